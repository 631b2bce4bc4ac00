"""Folders of sentence-transformers: pooling, dense layers and normalization, there and back."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from schemes import build, tiny, tokens
from small_encoders import NEAR, theirs_of

import phasor
from phasor.checkpoints.load import read_config
from phasor.config.parameters import parameters_of

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

MODES = {
    "mean": lambda hidden, real: (hidden * real).sum(1) / real.sum(1),
    "cls": lambda hidden, real: hidden[:, 0],
    "max": lambda hidden, real: torch.where(real > 0, hidden, -torch.inf).max(1).values,
    "lasttoken": lambda hidden, real: torch.stack([hidden[i, real[i, :, 0] > 0][-1] for i in range(len(hidden))]),
}
FLAGS = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens", "lasttoken": "lasttoken"}
SENTENCE_CLASSES = [
    transformers.BertModel,
    transformers.RobertaModel,
    transformers.DistilBertModel,
    transformers.RoFormerModel,
    transformers.ModernBertModel,
    transformers.XLMRobertaModel,
    transformers.MPNetModel,
    transformers.T5EncoderModel,
    transformers.MT5EncoderModel,
]


def sentence_folder(folder, theirs, mode="mean", normalize=True, newer=False):
    """A folder as sentence-transformers saves it, in its older or its newer spelling."""
    theirs.save_pretrained(folder)
    kinds = {"Transformer": "", "Pooling": "1_Pooling"} | ({"Normalize": "2_Normalize"} if normalize else {})
    within = {"Transformer": "base.modules.transformer", "Pooling": "sentence_transformer.modules.pooling"}
    within["Normalize"] = "base.modules.normalize"
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": path,
            "type": f"sentence_transformers.{within[kind] if newer else 'models'}.{kind}",
        }
        for i, (kind, path) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 24, **{f"pooling_mode_{f}": m == mode for m, f in FLAGS.items()}}
    pooling |= {"include_prompt": True}
    if newer:
        pooling = {"embedding_dimension": 24, "pooling_mode": mode, "include_prompt": True}
    (folder / "1_Pooling/config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 40, "do_lower_case": false}')
    (folder / "config_sentence_transformers.json").write_text('{"prompts": {"query": "query: "}}')
    return folder


def add_dense(folder, *layers, **fields):
    """Put dense modules, each an output width, a bias and an activation, before the normalization of a folder."""
    file, width = folder / "modules.json", 24
    modules = json.loads(file.read_text())
    for i, (out_features, bias, activation) in enumerate(layers, start=2):
        module = {"path": f"{i}_Dense", "type": "sentence_transformers.models.Dense"}
        modules.insert(i, {"idx": i, "name": str(i)} | module)
        (folder / f"{i}_Dense").mkdir()
        settings = {"in_features": width, "out_features": out_features, "bias": bias}
        settings |= {"activation_function": activation} | fields
        (folder / f"{i}_Dense/config.json").write_text(json.dumps(settings))
        weights = {"linear.weight": torch.randn(out_features, width)}
        weights |= {"linear.bias": torch.randn(out_features)} if bias else {}
        save_file(weights, folder / f"{i}_Dense/model.safetensors")
        width = out_features
    for i, module in enumerate(modules):
        module |= {"idx": i, "name": str(i)}
    file.write_text(json.dumps(modules))
    return folder


def change_config(folder, module="1_Pooling", **fields):
    """A module's settings with some changed."""
    file = folder / module / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


class TestSentences:
    @torch.no_grad()
    @pytest.mark.sample(14)
    @pytest.mark.parametrize(("normalize", "newer"), [(False, False), (True, False), (True, True)])
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("cls", SENTENCE_CLASSES, ids=lambda cls: cls.__name__)
    def test_one_vector_a_sentence_there_and_back(self, tmp_path, cls, mode, normalize, newer):
        theirs = theirs_of(cls, pad_token_id=3)
        folder = sentence_folder(tmp_path / "theirs", theirs, mode, normalize, newer)
        ids, real = tokens(3, 12).clamp(min=4), torch.ones(3, 12, dtype=torch.bool)
        real[1, 8:], real[2, 5:] = False, False
        hidden = theirs(ids, attention_mask=real.long()).last_hidden_state
        expected = MODES[mode](hidden, real[..., None].float())
        if normalize:
            expected = expected / expected.square().sum(-1, keepdim=True).sqrt()
        ours = phasor.load(folder)
        assert read_config(folder).head == ours.config.head
        assert float((ours(ids, attention_mask=real) - expected).abs().max()) <= NEAR
        phasor.save(ours, tmp_path / "ours", format="hf")
        again = phasor.load(tmp_path / "ours")
        assert torch.equal(again(ids, attention_mask=real), ours(ids, attention_mask=real))
        back = cls.from_pretrained(tmp_path / "ours")
        assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), back.parameters(), strict=True))

    @torch.no_grad()
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_the_last_token_of_a_decoder(self, tmp_path, side):
        """As in embedding models made of language models, saved as these with their architecture."""
        sizes = {"vocab_size": 60, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 40}
        theirs = transformers.Qwen3Model(transformers.Qwen3Config(**sizes, tie_word_embeddings=True)).eval()
        folder = sentence_folder(tmp_path / "theirs", theirs, "lasttoken")
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": ["Qwen3ForCausalLM"]}))
        ids, real = tokens(3, 12).clamp(min=4), torch.ones(3, 12, dtype=torch.bool)
        real[1, slice(0, 4) if side == "left" else slice(8, 12)] = False
        hidden = theirs(ids, attention_mask=real.long(), position_ids=(real.cumsum(1) - 1).clamp(min=0))[0]
        last = MODES["lasttoken"](hidden, real[..., None])
        ours = phasor.load(folder)
        expected = torch.nn.functional.normalize(last, dim=-1)
        assert float((ours(ids, attention_mask=real) - expected).abs().max()) <= NEAR
        assert phasor.convert(folder, tmp_path / "ours", format="hf", check=True).largest <= NEAR
        assert torch.equal(phasor.load(tmp_path / "ours")(ids), ours(ids))

    @pytest.mark.filterwarnings("ignore:tensors phasor has no use for")
    def test_the_files_beside_the_model(self, tmp_path):
        ours = phasor.load(sentence_folder(tmp_path / "theirs", theirs_of(transformers.BertModel)))
        for _ in range(2):  # the second time over the first
            phasor.save(ours, tmp_path / "ours", format="hf")
        folder = tmp_path / "ours"
        modules = json.loads((folder / "modules.json").read_text())
        assert [(m["path"], m["type"].split(".")[-1]) for m in modules] == [
            ("", "Transformer"),
            ("1_Pooling", "Pooling"),
            ("2_Normalize", "Normalize"),
        ]
        assert (folder / "2_Normalize").is_dir()
        for name in ("sentence_bert_config.json", "config_sentence_transformers.json"):
            assert (folder / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
        phasor.save(ours, tmp_path / "native")
        assert torch.equal(phasor.load(tmp_path / "native")(tokens(1, 9)), ours(tokens(1, 9)))

    def test_a_conversion_checks_itself(self, tmp_path):
        folder = sentence_folder(tmp_path / "theirs", theirs_of(transformers.BertModel))
        assert phasor.convert(folder, tmp_path / "ours", format="hf", check=True).largest <= NEAR
        assert (tmp_path / "ours/modules.json").is_file()

    def test_a_folder_with_a_strangers_file_is_left_alone(self, tmp_path):
        folder = sentence_folder(tmp_path / "theirs", theirs_of(transformers.BertModel))
        ours = phasor.load(folder)
        (folder / "1_Pooling/notes.txt").write_text("mine")
        with pytest.raises(ValueError, match=r"holds more than a model \(1_Pooling/notes.txt\)"):
            phasor.save(ours, folder, format="hf")
        assert (folder / "1_Pooling/notes.txt").read_text() == "mine"

    def test_a_model_of_our_own(self, tmp_path):
        head = {"kind": "pooled", "pooler": "mean", "normalize": True}
        sizes = {"dim": 24, "num_heads": 3, "num_layers": 2, "vocab_size": 61, "max_length": 40}
        model = build(phasor.preset("bert", **sizes, head=head))
        phasor.save(model, tmp_path / "ours", format="hf")
        again = phasor.load(tmp_path / "ours")
        assert again.config.head == model.config.head
        assert torch.equal(again(tokens(2, 9)), model(tokens(2, 9)))
        length = json.loads((tmp_path / "ours/sentence_bert_config.json").read_text())["max_seq_length"]
        assert length == 40

    def test_a_pooling_without_a_name_is_refused(self, tmp_path):
        sizes = {"dim": 24, "num_heads": 3, "num_layers": 2, "vocab_size": 61, "max_length": 40}
        model = build(phasor.preset("bert", **sizes, head="pooled"))
        model.origin = phasor.load(sentence_folder(tmp_path / "theirs", theirs_of(transformers.BertModel))).origin
        with pytest.raises(
            ValueError, match="sentence-transformers has no pooling 'first'; it has cls, mean, max, last"
        ):
            phasor.save(model, tmp_path / "ours", format="hf")
        assert not (tmp_path / "ours").exists()

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"pooling_mode_cls_token": True}, "one pooling, of cls, mean, max, lasttoken, not cls and mean"),
            ({"pooling_mode_mean_tokens": False, "pooling_mode_weightedmean_tokens": True}, "not weightedmean"),
            ({"include_prompt": False}, "include_prompt"),
            ({"word_embedding_dimension": 25}, "word_embedding_dimension = 25"),
            ({"temperature_of_pooling": 2}, "temperature_of_pooling"),
            ({"pooling_mode": 7}, "not 7"),
        ],
    )
    def test_a_pooling_that_is_not_honored(self, tmp_path, fields, words):
        folder = sentence_folder(tmp_path, theirs_of(transformers.BertModel))
        change_config(folder, **fields)
        with pytest.raises(ValueError, match=words) as error:
            phasor.load(folder)
        assert "1_Pooling" in str(error.value)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (
                lambda m: [*m, m[1] | {"type": "sentence_transformers.models.Dense"}],
                "in this order, not Transformer, Pooling, Normalize, Dense",
            ),
            (lambda m: [m[0] | {"type": "custom_st.Transformer"}, *m[1:]], "custom_st.Transformer"),
            (lambda m: [m[0] | {"path": "0_Transformer"}, *m[1:]], "0_Transformer"),
            (lambda m: [m[0], m[1] | {"path": "../1_Pooling"}, *m[2:]], "path inside the folder"),
            (lambda m: m[:1], "not Transformer"),
            (lambda m: ["Transformer"], "must have a type"),
            (lambda m: {"0": m[0]}, "must hold a JSON list"),
        ],
    )
    def test_modules_that_are_not_honored(self, tmp_path, change, words):
        folder = sentence_folder(tmp_path, theirs_of(transformers.BertModel))
        modules = json.loads((folder / "modules.json").read_text())
        (folder / "modules.json").write_text(json.dumps(change(modules)))
        with pytest.raises(ValueError, match=words) as error:
            phasor.load(folder)
        assert "modules.json" in str(error.value)

    def test_a_normalization_of_something_else(self, tmp_path):
        folder = sentence_folder(tmp_path, theirs_of(transformers.BertModel))
        (folder / "2_Normalize").mkdir()
        (folder / "2_Normalize/config.json").write_text('{"module_input_name": "token_embeddings"}')
        with pytest.raises(ValueError, match="module_input_name"):
            phasor.load(folder)

    def test_a_model_that_gives_out_something_else(self, tmp_path):
        folder = sentence_folder(tmp_path, theirs_of(transformers.BertModel))
        (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 40, "transformer_task": "fill-mask"}')
        with pytest.raises(ValueError, match=r"sentence_bert_config.json: .* transformer_task = 'fill-mask'"):
            phasor.load(folder)

    def test_missing_settings(self, tmp_path):
        folder = sentence_folder(tmp_path, theirs_of(transformers.BertModel))
        shutil.rmtree(folder / "1_Pooling")
        with pytest.raises(ValueError, match="1_Pooling"):
            phasor.load(folder)


IDENTITY, ACTIVATION = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation."
CLASSES = {
    IDENTITY: lambda x: x,
    f"{ACTIVATION}Tanh": torch.tanh,
    f"{ACTIVATION}ReLU": torch.relu,
    f"{ACTIVATION}GELU": lambda x: x * torch.special.ndtr(x),
    f"{ACTIVATION}SiLU": lambda x: x * torch.sigmoid(x),
}
EMBEDDING_GEMMA = [(40, False, IDENTITY), (16, False, IDENTITY)]
LABSE = [(24, True, f"{ACTIVATION}Tanh")]
NAMES = {"identity": IDENTITY} | {name.rpartition(".")[2].lower(): name for name in CLASSES if name != IDENTITY}


def dense_formula(folder, vector):
    """What the dense modules of a folder make of a vector, by their files."""
    for path in sorted(folder.glob("*_Dense")):
        weights, config = load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())
        vector = vector @ weights["linear.weight"].T + weights.get("linear.bias", 0)
        vector = CLASSES[config["activation_function"]](vector)
    return vector


class TestDense:
    @pytest.mark.sample(6)
    @torch.no_grad()
    @pytest.mark.parametrize("normalize", [False, True])
    @pytest.mark.parametrize(
        "layers",
        [EMBEDDING_GEMMA, LABSE, *([(7, True, name), (9, False, name)] for name in list(CLASSES)[2:])],
        ids=["EmbeddingGemma", "LaBSE", "ReLU", "GELU", "SiLU"],
    )
    def test_dense_layers_there_and_back(self, tmp_path, layers, normalize):
        theirs = theirs_of(transformers.DistilBertModel, pad_token_id=3)
        folder = add_dense(sentence_folder(tmp_path / "theirs", theirs, normalize=normalize), *layers)
        ids, real = tokens(3, 12).clamp(min=4), torch.ones(3, 12, dtype=torch.bool)
        real[1, 8:], real[2, 5:] = False, False
        hidden = theirs(ids, attention_mask=real.long()).last_hidden_state
        expected = dense_formula(folder, MODES["mean"](hidden, real[..., None].float()))
        if normalize:
            expected = expected / expected.square().sum(-1, keepdim=True).sqrt()
        ours = phasor.load(folder)
        head = ours.config.head
        assert [(d.out_features, d.bias, NAMES[d.activation]) for d in head.dense] == layers
        assert read_config(folder).head == head
        found = ours(ids, attention_mask=real)
        assert float((found - expected).abs().max()) <= NEAR * max(1, float(expected.abs().max()))
        for _ in range(2):  # the second time over the first
            phasor.save(ours, tmp_path / "ours", format="hf")
        phasor.save(ours, tmp_path / "native")
        for saved in ("ours", "native"):
            assert torch.equal(phasor.load(tmp_path / saved)(ids, attention_mask=real), found)
        assert (tmp_path / f"ours/{2 + len(layers)}_Normalize").is_dir() == normalize
        for path in folder.glob("*_Dense"):
            assert json.loads((tmp_path / "ours" / path.name / "config.json").read_text()) == json.loads(
                (path / "config.json").read_text()
            )
            before, after = (load_file(f / path.name / "model.safetensors") for f in (folder, tmp_path / "ours"))
            assert before.keys() == after.keys()
            assert all(torch.equal(before[name], after[name]) for name in before)
        back = transformers.DistilBertModel.from_pretrained(tmp_path / "ours")
        assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), back.parameters(), strict=True))

    def test_a_conversion_checks_itself(self, tmp_path):
        theirs = theirs_of(transformers.DistilBertModel)
        folder = add_dense(sentence_folder(tmp_path / "theirs", theirs), *EMBEDDING_GEMMA)
        for format in ("hf", "phasor"):
            assert phasor.convert(folder, tmp_path / format, format=format, check=True).largest <= NEAR
        phasor.convert(tmp_path / "phasor", tmp_path / "back", check=True)
        for name in ("2_Dense", "3_Dense"):
            before, after = (load_file(f / name / "model.safetensors") for f in (folder, tmp_path / "back"))
            assert torch.equal(before["linear.weight"], after["linear.weight"])

    @torch.no_grad()
    def test_embedding_gemma(self, tmp_path):
        sizes = {"vocab_size": 60, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "head_dim": 8}
        sizes |= {"num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 40}
        config = transformers.Gemma3TextConfig(**sizes, use_bidirectional_attention=True)
        theirs = transformers.Gemma3TextModel(config).eval()
        folder = add_dense(sentence_folder(tmp_path / "theirs", theirs), *EMBEDDING_GEMMA)
        vector = dense_formula(folder, theirs(tokens(3, 12)).last_hidden_state.mean(1))
        expected = torch.nn.functional.normalize(vector, dim=-1)
        assert float((phasor.load(folder)(tokens(3, 12)) - expected).abs().max()) <= NEAR
        assert phasor.convert(folder, tmp_path / "ours", format="hf", check=True).largest <= NEAR
        assert torch.equal(phasor.load(tmp_path / "ours")(tokens(3, 12)), phasor.load(folder)(tokens(3, 12)))

    def test_over_the_folder_it_came_from(self, tmp_path):
        folder = add_dense(sentence_folder(tmp_path, theirs_of(transformers.BertModel)), *LABSE)
        ours = phasor.load(folder)
        with torch.no_grad():
            ours.pooler.layers[0].bias += 1
        expected = ours(tokens(2, 9))
        phasor.save(ours, folder, format="hf")
        assert torch.equal(phasor.load(folder)(tokens(2, 9)), expected)

    def test_another_dtype(self, tmp_path):
        folder = add_dense(sentence_folder(tmp_path, theirs_of(transformers.BertModel)), *EMBEDDING_GEMMA)
        ours = phasor.load(folder, dtype=torch.bfloat16)
        assert ours(tokens(2, 9)).dtype == torch.bfloat16
        expected = load_file(folder / "3_Dense/model.safetensors")["linear.weight"].bfloat16()
        assert torch.equal(ours.pooler.layers[1].weight, expected)

    def test_settings_that_are_left_out_are_those_of_the_class(self, tmp_path):
        folder = add_dense(sentence_folder(tmp_path, theirs_of(transformers.BertModel)), *LABSE)
        (folder / "2_Dense/config.json").write_text(
            '{"in_features": 24, "out_features": 24, "module_input_name": "sentence_embedding"}'
        )
        assert phasor.load(folder).config.head.dense == (phasor.DenseConfig(out_features=24, activation="tanh"),)

    def test_the_weights_that_a_plan_counts(self):
        layers = ({"out_features": 40, "bias": False}, {"out_features": 7, "activation": "tanh"})
        config = tiny("rotary", shape="encoder", head={"kind": "pooled", "pooler": "mean", "dense": layers})
        assert parameters_of(config).total == sum(weight.numel() for weight in build(config).parameters())
        assert build(config)(tokens(2, 9)).shape == (2, 7)

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"in_features": 25}, "in_features = 25; it must be 24"),
            ({"activation_function": f"{ACTIVATION}Sigmoid"}, "Sigmoid'?; known: .*Identity, .*Tanh"),
            ({"out_features": 0}, "out_features"),
            ({"out_features": "wide"}, "out_features"),
            ({"out_features": None}, "out_features is missing"),
            ({"bias": 3}, "bias must be"),
            ({"module_input_name": "token_embeddings"}, "module_input_name"),
            ({"scale": 2}, "scale"),
        ],
    )
    def test_settings_that_are_not_honored(self, tmp_path, fields, words):
        folder = add_dense(sentence_folder(tmp_path, theirs_of(transformers.BertModel)), *LABSE)
        change_config(folder, "2_Dense", **fields)
        with pytest.raises(ValueError, match=words) as error:
            phasor.load(folder)
        assert "2_Dense/config.json" in str(error.value)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda w: {"linear.weight": torch.ones(24, 25), "linear.bias": w["linear.bias"]}, r"shape \[24, 25\]"),
            (lambda w: {"linear.weight": w["linear.weight"]}, "2_Dense/linear.bias is missing"),
            (lambda w: w | {"linear.scale": torch.ones(1)}, "2_Dense/linear.scale is not the model's"),
        ],
    )
    def test_weights_that_do_not_fit(self, tmp_path, change, words):
        folder = add_dense(sentence_folder(tmp_path, theirs_of(transformers.BertModel)), *LABSE)
        file = folder / "2_Dense/model.safetensors"
        save_file(change({name: weight.clone() for name, weight in load_file(file).items()}), file)
        with pytest.raises(ValueError, match=words):
            phasor.load(folder)

    def test_a_pickle_is_not_opened(self, tmp_path):
        folder = add_dense(sentence_folder(tmp_path, theirs_of(transformers.BertModel)), *LABSE)
        (folder / "2_Dense/model.safetensors").rename(folder / "2_Dense/pytorch_model.bin")
        with pytest.raises(ValueError, match=r"2_Dense holds pytorch_model.bin, a pickle, .* sentence-transformers"):
            phasor.load(folder)
