"""What goes wrong between phasor and the Hugging Face hub, as one sentence that says what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from phasor.checkpoints.hub import HubName, UnreachableError, hub_cache
from phasor.config.schema import shorten


def endpoint() -> str:
    """The address of the hub."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


@contextmanager
def quiet_logging() -> Iterator[None]:
    """What goes wrong is said in one sentence, and not by warnings before it too."""
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def hub_errors(hub: HubName) -> Iterator[None]:
    """Give what goes wrong as one sentence."""
    from huggingface_hub import errors, get_token
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined,unused-ignore]  # that of its HTTP library

    place = endpoint()
    resume = "run it again, and what is there already is continued"
    try:
        yield
    except errors.GatedRepoError:
        token = "your token was not given access" if get_token() else "log in by `hf auth login`, or set HF_TOKEN"
        raise ValueError(f"{hub} is gated: accept its conditions at {place}/{hub.name}, and {token}") from None
    except errors.RevisionNotFoundError:
        raise ValueError(f"{hub.name} on {place} has no branch, tag or commit {hub.revision}") from None
    except errors.RepositoryNotFoundError:
        private = "" if get_token() else "; if it is private, log in by `hf auth login`, or set HF_TOKEN"
        raise ValueError(f"there is no folder {hub.name} here, and no model of that name on {place}{private}") from None
    except errors.RemoteEntryNotFoundError as error:
        raise ValueError(f"{hub} is incomplete on {place}: {shorten(str(error), 200)}") from None
    except errors.OfflineModeIsEnabled:
        raise ValueError(f"HF_HUB_OFFLINE forbids to fetch {hub}: unset it, or give a folder") from None
    except (errors.LocalEntryNotFoundError, errors.FileMetadataError) as error:
        raise UnreachableError(f"{place} cannot be reached ({reason_of(error.__cause__ or error)})") from None
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise ValueError(
                f"{place} refuses {hub} ({status}): log in by `hf auth login`, or set HF_TOKEN to a token that may "
                "read it"
            ) from None
        raise UnreachableError(f"{place} answers {status} for {hub}: try again later, or give a folder") from None
    except HTTPError as error:
        raise UnreachableError(f"{place} cannot be reached for {hub} ({reason_of(error)}): {resume}") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ValueError(f"the disk of {hub_cache()} is full: make room, and {resume}") from None
        if error.errno is None:  # huggingface_hub's own, of a file that is not as long as it should be
            raise ValueError(f"a file of {hub} was cut off: {resume}") from None
        raise


def reason_of(error: BaseException) -> str:
    """The first line of what an error says, or its kind where that says nothing."""
    return shorten(next(iter(str(error).splitlines()), "") or type(error).__name__, 200)
