"""Generation: a request, a decoding strategy, and a runner of single steps.

`generate` and `stream` build a request, choose the strategy (greedy decoding and sampling, beam search, contrastive
search, speculative decoding), and return tokens or text.
"""

from phasor.generation.api import Generated, generate, stream

__all__ = ["Generated", "generate", "stream"]
