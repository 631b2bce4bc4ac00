"""Small encoders of transformers with every weight drawn."""

import transformers
from families.cases import redraw

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 60,
}
NEAR = 2e-5


def theirs_of(cls, **fields):
    """A model of theirs with every weight drawn."""
    names = {"intermediate_size": "hidden_dim"} if cls is transformers.DistilBertModel else {}
    theirs = cls(cls.config_class(**{names.get(n, n): v for n, v in (SIZES | fields).items()})).eval()
    redraw(theirs, lambda name: False)
    return theirs
