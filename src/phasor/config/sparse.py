"""Patterns of sparse attention: which keys a query attends to, out of those that its mask shows."""

from __future__ import annotations

from typing import ClassVar

from phasor.config.schema import Choice, greater_than_one, not_negative, positive


class SparseConfig(Choice, what="sparse attention pattern"):
    """The keys that a query attends to, by their index in the sequence or by their scores."""

    takes_window: ClassVar[bool] = False  # whether a window may narrow the pattern
    causal_only: ClassVar[bool] = False  # whether the pattern is for decoders alone

    @property
    def reach(self) -> int | None:
        """How many tokens back a query can see, its own included; None for all of them."""
        return None

    def visible_keys(self, length: int, causal: bool, window: int | None) -> float:
        """How many keys a query sees, on average over a row of `length` tokens; the window narrows the pattern."""
        raise NotImplementedError(f"{type(self).__name__} does not define its pattern")


class ChunkedConfig(SparseConfig, kind="chunked"):
    """The keys of the query's own chunk of `chunk` tokens (Llama 4).

    >>> ChunkedConfig(chunk=8192).reach
    8192
    """

    takes_window: ClassVar[bool] = True
    chunk: int = 8192

    def check(self) -> None:
        positive(self, "chunk")

    @property
    def reach(self) -> int | None:
        return self.chunk

    def visible_keys(self, length: int, causal: bool, window: int | None) -> float:
        """
        >>> ChunkedConfig(chunk=4).visible_keys(6, causal=True, window=None)
        2.1666666666666665
        """
        return visible_in_segments(length, self.chunk, 1, causal, window)


class StridedConfig(SparseConfig, kind="strided"):
    """Blocks near the query's own, every `stride`-th block, and the first blocks (Longformer, BigBird).

    A query of block `a` attends to block `b` if `|a - b| < local`, if `a - b` is a multiple of `stride`, or if either
    is one of the first `global_blocks`. A block has `block` tokens.
    """

    block: int = 64
    local: int = 4
    stride: int | None = None
    global_blocks: int = 0

    def check(self) -> None:
        positive(self, "block")
        not_negative(self, "global_blocks")
        if self.local < 1:
            raise ValueError(
                f"StridedConfig.local must be at least 1, not {self.local}: without its own block a query may be left "
                "without a key"
            )
        if self.stride is not None:
            greater_than_one(self, "stride")

    def visible_keys(self, length: int, causal: bool, window: int | None) -> float:
        """
        >>> StridedConfig(block=2, local=1, stride=2).visible_keys(6, causal=True, window=None)
        2.1666666666666665
        """
        blocks, seen = -(-length // self.block), 0.0
        last = length - (blocks - 1) * self.block  # tokens of the last block
        for own in range(blocks):
            size, ahead = last if own == blocks - 1 else self.block, blocks - 1 - own
            first = sum(not self.shows(own - block) for block in range(min(self.global_blocks, own)))
            keys = self.block * (self.count_shown(own) + first)
            if causal:
                seen += size * keys + size * (size + 1) / 2
            elif own < self.global_blocks:
                seen += size * length
            else:
                missing = self.block - last if ahead and self.shows(ahead) else 0
                seen += size * (keys + size + self.block * self.count_shown(ahead) - missing)
        return seen / length

    def shows(self, distance: int) -> bool:
        """Whether blocks at this distance see each other, unless one of them is global."""
        return distance < self.local or (self.stride is not None and distance % self.stride == 0)

    def count_shown(self, furthest: int) -> int:
        """How many distances from 1 to the furthest `shows` holds for."""
        near = min(furthest, self.local - 1)
        return near + (furthest // self.stride - near // self.stride if self.stride is not None else 0)


class DilatedConfig(SparseConfig, kind="dilated"):
    """Every `dilation`-th key of the query's own segment, counted from the query (LongNet).

    Without a `segment` it is every `dilation`-th key of the sequence. With a window it is Longformer's dilated sliding
    window.
    """

    takes_window: ClassVar[bool] = True
    dilation: int = 4
    segment: int | None = None

    def check(self) -> None:
        greater_than_one(self, "dilation")
        positive(self, "segment")
        if self.segment is not None and self.segment % self.dilation:
            raise ValueError(
                f"DilatedConfig.segment ({self.segment}) is not a multiple of dilation ({self.dilation}), so that "
                "queries of a segment would attend to different numbers of keys"
            )

    @property
    def reach(self) -> int | None:
        return self.segment

    def visible_keys(self, length: int, causal: bool, window: int | None) -> float:
        """
        >>> DilatedConfig(dilation=2).visible_keys(4, causal=True, window=None)
        1.5
        """
        return visible_in_segments(length, self.segment or length, self.dilation, causal, window)


class TopKConfig(SparseConfig, kind="top-k"):
    """The query's own block, and the earlier blocks whose mean keys score highest with it (MoBA).

    Blocks have `block` tokens; a query of a head attends to `top_k` of them, its own included.
    """

    causal_only: ClassVar[bool] = True
    block: int = 512
    top_k: int = 8

    def check(self) -> None:
        positive(self, "block", "top_k")

    def visible_keys(self, length: int, causal: bool, window: int | None) -> float:
        """
        >>> TopKConfig(block=2, top_k=2).visible_keys(6, causal=True, window=None)
        2.8333333333333335
        """
        sizes = [min(self.block, length - start) for start in range(0, length, self.block)]
        earlier = [min(own, self.top_k - 1) * self.block for own in range(len(sizes))]
        return sum(n * seen + n * (n + 1) / 2 for n, seen in zip(sizes, earlier, strict=True)) / length


def visible_in_segments(length: int, segment: int, dilation: int, causal: bool, window: int | None) -> float:
    """How many keys a query sees on average, where those of its segment at every `dilation`-th distance are visible."""
    seen = 0
    for size, count in ((segment, length // segment), (length % segment, 1)):
        for rest in range(min(dilation, size)):
            tokens = -(-(size - rest) // dilation)  # of the segment, with this remainder
            near = min(-(-window // dilation), tokens) if window is not None else tokens
            behind = near * (near + 1) // 2 + (tokens - near) * near
            seen += count * (behind if causal else 2 * behind - tokens)
    return seen / length
