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
T5 = {"intermediate_size": "d_ff", "hidden_size": "d_model", "num_hidden_layers": "num_layers"}
T5 |= {"max_position_embeddings": "n_positions"}
NAMES = {  # of sizes in configurations that have others
    transformers.DistilBertConfig: {"intermediate_size": "hidden_dim"},
    transformers.T5Config: T5,
    transformers.MT5Config: T5,
}
NEAR = 2e-5


def theirs_of(cls, **fields):
    """A model of theirs with every weight drawn."""
    names = NAMES.get(cls.config_class, {})
    theirs = cls(cls.config_class(**{names.get(n, n): v for n, v in (SIZES | fields).items()})).eval()
    redraw(theirs, lambda name: False)
    return theirs
