"""Operations, one folder each: the public function with its dispatch table, its plain reference, its Triton kernels.

`dispatch.py` has the tables' class and the reasons against Triton kernels. A folder's `__init__.py` exports the public
function, the reference (`..._ref`) and the table (in capitals); only the files with kernels import Triton, and they
are imported when a kernel is launched. One folder has no table: the kernels of `decode` are launched by the fused step
runner (`generation/runners/fused.py`) and by experts (`nn/moe.py`).

Kernels share one legend of names:

- tensors: `q k v` queries, keys and values; `acc` the accumulator of a matmul; `m_i l_i` the maximum and the sum of the
  running softmax; `p` weights, `lse` the logsumexp of scores; `do dq dk dv ds dx dw` gradients
- `x_ptr`: the pointer to a tensor; `stride_qb stride_qt stride_qh stride_qd`: the strides of `[B, T, H, D]`
- `pid`: the program; `offs_m offs_n offs_d offs_k`: the offsets of a tile along a dimension
- `num_queries num_keys num_heads num_kv_heads group_size`: sizes; `group_size` query heads share one key/value head
- `BLOCK_M BLOCK_N BLOCK_K`: the rows, columns and inner dimension of a tile (queries and keys in attention, choices of
  a token in routing)
- `BLOCK_D BLOCK_V BLOCK_H BLOCK_G BLOCK_E BLOCK_T BLOCK_SPLITS`: a tile along features, vocabulary, heads, heads of a
  group, experts, taps of a convolution or tokens, splits; `BLOCK_ROUTER`: inputs of a router; `BLOCK`: along the only
  dimension there is; `BLOCK_TILE`: the part of a `BLOCK` held at a time
- `HEAD_DIM ROTARY_DIM NUM_HEADS NUM_KV_HEADS GROUP_SIZE NUM_SPLITS SPLIT_SIZE TOP_K NUM_KNOTS PAGE_SIZE`: sizes known
  when the kernel is compiled; `PAGE_SIZE` is 0 without pages
- `STRIDE_...`: strides known when the kernel is compiled; `CONTIGUOUS`: how many features in a row are contiguous
- `NUM_STAGES`: how many loads of a loop are in flight; `USE_PDL`: programmatic dependent launch (`pdl.py`)
- `HAS_...`: whether an optional argument is given; `ADJACENT`: whether rotary pairs are adjacent features
- `ACTIVATION CENTERED GLU BIAS`: which activation, LayerNorm or RMSNorm, gated or not, what is added to scores
- `BLOCK SLOTS CAUSAL` in sparse attention: the tokens of a key block, the tiles a query is in, whether order hides
  keys; `ONE_BLOCK ONE_TILE`: whether a tile has one block, and all blocks are in one tile
- `KEY_DIM VALUE_DIM` over split keys: the features of a key, those that are values too left out, and of a value
- `CHUNK KEY_DIM VALUE_DIM` in linear attention: the tokens of a chunk, the features of a key and of a value, of which
  `BLOCK_K` and `BLOCK_V` are tiles; `IS_DELTA`: the delta rule or retention; `IS_TRANSITION`: tokens write nothing;
  `LOG2_CHUNK PRECISION`: how chunks are inverted and multiplied; `PARTS`: the chunks for which there is one state; `g`
  a log decay, `beta` a strength, `z` what a token writes
- `GROUP GATES TAPS` in a step of linear attention: the columns of a key head among those of a projection and among
  gates, the taps of its convolution; `CONVOLVED`: the columns of a group that are convolved; `TIME`: where times begin
- `USE_... IN_RANGE MAY_BE_EMPTY ONE_SIDED TWO_INTERVALS STOCHASTIC INVERSE NORMALIZE PREFETCH`: what holds for all
  elements of a launch, so that the kernel is compiled for it; `DTYPE INTEGER_ASM LR_IS_POINTER`: how an operand is
  read
- `PAIRS HEADS KV_HEADS` of rotations by given phases: the pairs of features that rotate, and the heads that share their
  angles; `PHASES_BY_ROW SCALES_BY_ROW`: whether rows of a batch differ in them; `POSITIVE`: polar features of inputs
  that are magnitudes already
- `REVERSE NUM_TILES MAX_BLOCKS` of running sums: from the last token on; the tiles of a block; the blocks, padded
- `PART` of sums over keys: the dtype of the two parts that float32 is multiplied in
- `SCALE_GROUP` of 4-bit weights: how many inputs share a scale; `PACKING`: the weights of an element; `NUM_WORDS`: the
  elements of a row of a tile; `PLACE`: the lowest bit of one; `SHARE SHARES`: the weights of a thread, and how many
  times a tile has as many; `GROUPS`: of a tile
- `PAD`: the elements after each row of an output, which belong to another tensor
- `RANK PADDED` of an adapter, and as a tile has it; `TRANSPOSED`: whether a factor lies by its other dimension
- `GROUP Q_DIM WIDTH LAYOUT` in kernels for Hopper: the number of a warpgroup, `FIRST` or `SECOND`, the dimension along
  which queries lie, the columns that a polynomial serves, and how a tile lies in registers; `COUNT ARRIVALS` of
  barriers; `HALF` of the features, those whose gradients of queries a warpgroup computes; `STEP UNIT`: by how much the
  distance changes from column to column, and by how much where the variable of a polynomial changes by 1; `FIRST_ROW`
  of the part of a tile that is read
"""
