"""Endpoints that do what a test asks for; worker processes import this module."""

import os
import time

import numpy

from phasor.lab.endpoints import LabRequest, Matrix, bounded_field, register


class ExampleRequest(LabRequest):
    number: float = bounded_field(1.0, -10, 10)
    size: int = bounded_field(2, 1, 1 << 40)


def echo(request):
    return {"number": request.number, "nothing": [float("nan"), float("inf")]}


def matrix(request):
    return Matrix.of(numpy.arange(6).reshape(2, 3), most=5)


def square(request):
    return Matrix.of(numpy.zeros((request.size, request.size), "f4"))


def fail(request):
    raise ZeroDivisionError("a secret")


def crash(request):
    os._exit(3)


def work(request):
    """Compute in Python, without ever waiting, for a number of seconds."""
    end = time.monotonic() + request.number
    while time.monotonic() < end:
        pass
    return {"worker": os.getpid()}


def allocate(request):
    return {"last": int(numpy.ones(request.size, "u1")[-1])}


KEPT = []


def keep(request):
    KEPT.append(numpy.ones(request.size, "u1"))
    return {"worker": os.getpid()}


def nest(request):
    return nest(request)


for function in (echo, matrix, square, fail, crash, work, allocate, keep, nest):
    register("example", function.__name__, ExampleRequest, function)
