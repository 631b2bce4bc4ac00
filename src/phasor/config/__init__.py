"""Configurations: frozen, keyword-only, JSON both ways. Nothing here imports torch.

The configurations of position schemes and of kinds of attention are in `phasor.nn.positions` and
`phasor.nn.attention`, each beside its module; importing this package registers them all.
"""

from phasor.config.activations import ActivationConfig as ActivationConfig
from phasor.config.activations import GEGLUConfig as GEGLUConfig
from phasor.config.activations import GEGLUTanhConfig as GEGLUTanhConfig
from phasor.config.activations import GELUConfig as GELUConfig
from phasor.config.activations import GELUTanhConfig as GELUTanhConfig
from phasor.config.activations import GLUConfig as GLUConfig
from phasor.config.activations import ReGLUConfig as ReGLUConfig
from phasor.config.activations import ReLUConfig as ReLUConfig
from phasor.config.activations import ReLUSquaredConfig as ReLUSquaredConfig
from phasor.config.activations import SiLUConfig as SiLUConfig
from phasor.config.activations import SwiGLUClampedConfig as SwiGLUClampedConfig
from phasor.config.activations import SwiGLUConfig as SwiGLUConfig
from phasor.config.activations import XIELUConfig as XIELUConfig
from phasor.config.attention import AttentionConfig as AttentionConfig
from phasor.config.discovery import discover
from phasor.config.experts import ExpertsConfig as ExpertsConfig
from phasor.config.front_end import ConvolutionConfig as ConvolutionConfig
from phasor.config.front_end import FrontEndConfig as FrontEndConfig
from phasor.config.heads import ClassifierConfig as ClassifierConfig
from phasor.config.heads import DenseConfig as DenseConfig
from phasor.config.heads import HeadConfig as HeadConfig
from phasor.config.heads import LanguageHeadConfig as LanguageHeadConfig
from phasor.config.heads import LogitsConfig as LogitsConfig
from phasor.config.heads import MaskedHeadConfig as MaskedHeadConfig
from phasor.config.heads import NoHeadConfig as NoHeadConfig
from phasor.config.heads import PooledHeadConfig as PooledHeadConfig
from phasor.config.heads import SequenceClassifierConfig as SequenceClassifierConfig
from phasor.config.heads import TokenClassifierConfig as TokenClassifierConfig
from phasor.config.model import EncoderConfig as EncoderConfig
from phasor.config.model import LayerConfig as LayerConfig
from phasor.config.model import ModelConfig as ModelConfig
from phasor.config.parts import DeepNormConfig as DeepNormConfig
from phasor.config.parts import DropoutConfig as DropoutConfig
from phasor.config.parts import EmbeddingConfig as EmbeddingConfig
from phasor.config.parts import FanInInitConfig as FanInInitConfig
from phasor.config.parts import FeedForwardConfig as FeedForwardConfig
from phasor.config.parts import InitConfig as InitConfig
from phasor.config.parts import LayerNormConfig as LayerNormConfig
from phasor.config.parts import NoNormConfig as NoNormConfig
from phasor.config.parts import NormalInitConfig as NormalInitConfig
from phasor.config.parts import NormConfig as NormConfig
from phasor.config.parts import OutputConfig as OutputConfig
from phasor.config.parts import ParallelConfig as ParallelConfig
from phasor.config.parts import PlacementConfig as PlacementConfig
from phasor.config.parts import PostConfig as PostConfig
from phasor.config.parts import PreConfig as PreConfig
from phasor.config.parts import RMSNormConfig as RMSNormConfig
from phasor.config.parts import SandwichConfig as SandwichConfig
from phasor.config.parts import T5InitConfig as T5InitConfig
from phasor.config.parts import XavierInitConfig as XavierInitConfig
from phasor.config.positions import Extension as Extension
from phasor.config.positions import PositionConfig as PositionConfig
from phasor.config.sparse import ChunkedConfig as ChunkedConfig
from phasor.config.sparse import DilatedConfig as DilatedConfig
from phasor.config.sparse import SparseConfig as SparseConfig
from phasor.config.sparse import StridedConfig as StridedConfig
from phasor.config.sparse import TopKConfig as TopKConfig

discover()
