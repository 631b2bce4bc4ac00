"""What metrics are computed of: examples, and their tokens as training has them."""

from __future__ import annotations

from typing import NamedTuple

from phasor.data.split import Example
from phasor.data.token_files import TokenStore


class EncodedTexts(NamedTuple):
    """Examples as tokens; as texts too where they have several, as pairs do."""

    store: TokenStore
    examples: list[Example]
