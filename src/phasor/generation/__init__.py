"""Generation: a request, a decoding strategy, and a runner of single steps.

`generate` and `stream` build a request, choose the strategy (greedy decoding and sampling, beam search, contrastive
search, speculative decoding), and return tokens or text. `chat` and `ChatSession` do so by a chat template.
"""

from phasor.generation.api import generate, stream
from phasor.generation.chat import ChatSession, chat
from phasor.generation.generated import Generated

__all__ = ["ChatSession", "Generated", "chat", "generate", "stream"]
