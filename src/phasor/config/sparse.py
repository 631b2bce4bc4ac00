"""Patterns of sparse attention: which keys a query attends to, out of those that its mask shows."""

from __future__ import annotations

from phasor.config.schema import Choice, greater_than_one, not_negative, positive


class SparseConfig(Choice, what="sparse attention pattern"):
    """The keys that a query attends to, by their index in the sequence or by their scores."""

    @property
    def reach(self) -> int | None:
        """How many tokens back a query can see, its own included; None for all of them."""
        return None

    @property
    def takes_window(self) -> bool:
        """Whether a window may narrow the pattern."""
        return False

    @property
    def causal_only(self) -> bool:
        """Whether the pattern is for decoders alone."""
        return False


class ChunkedConfig(SparseConfig, kind="chunked"):
    """The keys of the query's own chunk of `chunk` tokens (Llama 4).

    >>> ChunkedConfig(chunk=8192).reach
    8192
    """

    chunk: int = 8192

    def check(self) -> None:
        positive(self, "chunk")

    @property
    def reach(self) -> int | None:
        return self.chunk

    @property
    def takes_window(self) -> bool:
        return True


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


class DilatedConfig(SparseConfig, kind="dilated"):
    """Every `dilation`-th key of the query's own segment, counted from the query (LongNet).

    Without a `segment` it is every `dilation`-th key of the sequence. With a window it is Longformer's dilated sliding
    window.
    """

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

    @property
    def takes_window(self) -> bool:
        return True


class TopKConfig(SparseConfig, kind="top-k"):
    """The query's own block, and the earlier blocks whose mean keys score highest with it (MoBA).

    Blocks have `block` tokens; a query of a head attends to `top_k` of them, its own included.
    """

    block: int = 512
    top_k: int = 8

    def check(self) -> None:
        positive(self, "block", "top_k")

    @property
    def causal_only(self) -> bool:
        return True
