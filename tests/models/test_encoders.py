"""What encoders have that decoders have not: in their parts, in old files, and beside the model."""

import json

import pytest
import torch
import transformers
from families.cases import redraw
from references import EXACT, normal
from safetensors.torch import load_file, save_file
from schemes import build, tiny, tokens
from small_encoders import NEAR, theirs_of

import phasor
from phasor import Record
from phasor.nn.positions.rotary.module import Rotary

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def rewritten(folder, rename=lambda name: [name], **config):
    """A folder whose tensors have other names, perhaps several each, and whose config.json other fields."""
    found = load_file(folder / "model.safetensors")
    named = {new: tensor.clone() for name, tensor in found.items() for new in rename(name)}
    save_file(named, folder / "model.safetensors", {"format": "pt"})
    fields = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps({n: v for n, v in fields.items() if v is not ...}))
    return named


class TestParts:
    @pytest.mark.parametrize(
        "config",
        [
            phasor.RotaryConfig(),
            phasor.XPosConfig(decay=512.0),
            phasor.RotaryConfig(extension=phasor.YaRN(factor=4.0, original_length=8)),
        ],
        ids=str,
    )
    def test_values_are_rotated_by_the_angle_alone(self, config):
        rotary = Rotary(config, head_dim=6, pairing="adjacent", rotate_values=True)
        v, positions = normal(2, 5, 3, 6), torch.tensor([0, 1, 7, 300, 2])
        rotated = rotary.on_value(v, rotary.prepare(phasor.nn.sequence.SequenceInfo(positions, 400), v))
        for t, position in enumerate(positions.tolist()):
            for pair, frequency in enumerate(rotary.frequencies(400)):
                number = torch.view_as_complex(v[:, t, :, 2 * pair : 2 * pair + 2].contiguous())
                angle = torch.tensor(position * float(frequency), dtype=torch.float64)
                expected = torch.view_as_real(number * torch.polar(torch.ones_like(angle), angle))
                torch.testing.assert_close(rotated[:, t, :, 2 * pair : 2 * pair + 2], expected, rtol=0, atol=EXACT)

    def test_rotated_values_are_stated(self):
        assert phasor.RotaryConfig(rotate_values=True).acts_on == ("queries", "keys", "values")
        assert not phasor.RotaryConfig(rotate_values=True).shift_invariant
        assert phasor.RotaryConfig().shift_invariant

    def test_a_sum_is_normed_before_it_is_brought_to_the_models_width(self):
        embedding = {"width": 10, "project": "sum", "norm": True, "token_types": 2}
        config = tiny("learned", shape="encoder", embedding=embedding, norm="layernorm", head="mlm")
        model, ids, record = build(config).double(), tokens(2, 7), Record("hidden")
        types = ids % 2
        logits = model(ids, token_types=types, record=record)
        stack, head = model.encoder, model.head
        x = model.tokens.weight[ids] + stack.positions[0].weight[:7] + stack.token_types.weight[types]
        assert x.shape[-1] == 10
        x = torch.nn.functional.linear(stack.embedding_norm(x), stack.project.weight, stack.project.bias)
        torch.testing.assert_close(record.hidden[0], x, rtol=0, atol=EXACT)
        inner = head.norm(torch.nn.functional.gelu(record.hidden[-1] @ head.dense.weight.T + head.dense.bias))
        assert inner.shape[-1] == 10
        torch.testing.assert_close(logits, inner @ model.tokens.weight.T + head.bias, rtol=0, atol=EXACT)

    def test_the_first_norm_can_be_left_out(self):
        config = tiny("rotary", shape="encoder", placement={"kind": "pre", "first_norm": False}, norm="layernorm")
        model, record, seen = build(config), Record("hidden"), []
        for block in model.encoder.blocks:
            block.attention.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
        model(tokens(1, 7), record=record)
        assert torch.equal(seen[0], record.hidden[0])
        second = model.encoder.blocks[1].residual.norms[0]
        assert torch.equal(seen[1], second(record.hidden[1]))
        assert not torch.equal(seen[1], record.hidden[1])

    def test_a_masked_heads_dense_layer_without_a_bias(self):
        model = build(tiny("rotary", shape="encoder", head={"kind": "mlm", "dense_bias": False}))
        assert model.head.dense.bias is None
        assert model(tokens(1, 7)).shape == (1, 7, 61)

    def test_fields_that_need_another(self):
        with pytest.raises(ValueError, match="width"):
            phasor.EmbeddingConfig(project="sum")
        with pytest.raises(ValueError, match="cls, mean, max"):
            phasor.PooledHeadConfig(pooler="none")


OLD_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
OLD_CONFIG = {
    "architectures": ["BertForMaskedLM"],
    "directionality": "bidi",
    "output_past": True,
    "pooler_fc_size": 768,
    "pooler_num_attention_heads": 12,
    "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128,
    "pooler_type": "first_token_transform",
    "position_embedding_type": "absolute",
    "pruned_heads": {},
    "torchscript": False,
    "tie_word_embeddings": ...,
}


def old_name(name):
    for new, old in OLD_NAMES.items():
        name = name.replace(new, old)
    return name


class TestOldFiles:
    @torch.no_grad()
    def test_bert_as_it_was_saved_for_years(self, tmp_path):
        theirs = theirs_of(transformers.BertForPreTraining)
        theirs.save_pretrained(tmp_path)
        copies = {
            "bert.embeddings.word_embeddings.weight": "cls.predictions.decoder.weight",
            "cls.predictions.bias": "cls.predictions.decoder.bias",
        }
        found = rewritten(tmp_path, lambda n: [old_name(n), *([copies[n]] if n in copies else [])], **OLD_CONFIG)
        found["bert.embeddings.position_ids"] = torch.arange(60)[None]
        save_file(found, tmp_path / "model.safetensors")
        ours, ids, record = phasor.load(tmp_path), tokens(2, 20), Record()
        expected = theirs(ids)
        assert float((ours(ids, record=record) - expected.prediction_logits).abs().max()) <= NEAR
        kept = ours.origin.passthrough
        next_sentence = record.pooled @ kept["cls.seq_relationship.weight"].T + kept["cls.seq_relationship.bias"]
        assert float((next_sentence - expected.seq_relationship_logits).abs().max()) <= NEAR
        phasor.save(ours, tmp_path / "again", format="hf")
        again = transformers.BertForPreTraining.from_pretrained(tmp_path / "again")
        assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), again.parameters(), strict=True))
        assert json.loads((tmp_path / "again/config.json").read_text())["pooler_type"] == "first_token_transform"
        with pytest.warns(UserWarning, match=r"leaves out: cls\.seq_relationship\."):
            phasor.save(ours, tmp_path / "ours")

    @torch.no_grad()
    @pytest.mark.parametrize("missing", ["cls.seq_relationship.", "cls.seq_relationship.bias"])
    def test_bert_without_one_of_its_heads_is_saved_as_a_class_without_it(self, tmp_path, missing):
        """A class with both heads would draw the missing one at random."""
        theirs = theirs_of(transformers.BertForPreTraining)
        theirs.save_pretrained(tmp_path)
        found = load_file(tmp_path / "model.safetensors")
        save_file({n: t for n, t in found.items() if not n.startswith(missing)}, tmp_path / "model.safetensors")
        phasor.save(phasor.load(tmp_path), tmp_path / "again", format="hf")
        assert json.loads((tmp_path / "again/config.json").read_text())["architectures"] == ["BertForMaskedLM"]
        again, told = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "again", output_loading_info=True)
        assert not told["missing_keys"]
        ids = tokens(2, 20)
        assert torch.equal(again.eval()(ids).logits, theirs(ids).prediction_logits)
        pooled = transformers.BertModel.from_pretrained(tmp_path / "again").eval()(ids).pooler_output
        assert torch.equal(pooled, theirs.bert(ids).pooler_output)
        assert phasor.load(tmp_path / "again").config.head == phasor.load(tmp_path).config.head

    @torch.no_grad()
    @pytest.mark.parametrize("tied", [True, False])
    @pytest.mark.parametrize("name", ["cls.predictions.bias", "cls.predictions.decoder.bias"])
    def test_the_logits_bias_under_either_name(self, tmp_path, name, tied):
        theirs = theirs_of(transformers.BertForMaskedLM, tie_word_embeddings=tied)
        bias = theirs.cls.predictions.decoder.bias
        theirs.save_pretrained(tmp_path)
        found = {n: t for n, t in load_file(tmp_path / "model.safetensors").items() if t.shape != bias.shape}
        save_file({**found, name: bias.clone()}, tmp_path / "model.safetensors")
        ids = tokens(2, 20)
        assert float((phasor.load(tmp_path)(ids) - theirs(ids).logits).abs().max()) <= NEAR

    @torch.no_grad()
    def test_where_no_class_is_named_the_tensors_tell(self, tmp_path):
        for cls, kind in ((transformers.BertForMaskedLM, "mlm"), (transformers.BertModel, "none")):
            theirs_of(cls).save_pretrained(tmp_path / kind)
            rewritten(tmp_path / kind, architectures=...)
            head = phasor.load(tmp_path / kind).config.head
            assert (head.kind, head.pooler) == (kind, "none" if kind == "mlm" else "first")

    @torch.no_grad()
    def test_a_model_without_its_pooler(self, tmp_path):
        theirs_of(transformers.BertModel).save_pretrained(tmp_path)
        rewritten(tmp_path, lambda name: [] if name.startswith("pooler") else [name])
        assert phasor.load(tmp_path).config.head.pooler == "none"

    @torch.no_grad()
    def test_a_head_that_is_not_asked_for_is_kept(self, tmp_path):
        theirs = theirs_of(transformers.BertForMaskedLM)
        theirs.save_pretrained(tmp_path)
        rewritten(tmp_path, architectures=["BertModel"])
        ours = phasor.load(tmp_path)
        assert ours(tokens(1, 7)).shape == (1, 7, 24)
        phasor.save(ours, tmp_path / "again", format="hf")
        again = transformers.BertForMaskedLM.from_pretrained(tmp_path / "again")
        assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), again.parameters(), strict=True))

    def test_a_repeated_tensor_that_differs_is_refused(self, tmp_path):
        theirs_of(transformers.BertForMaskedLM).save_pretrained(tmp_path)
        found = load_file(tmp_path / "model.safetensors")
        found["cls.predictions.decoder.bias"] = found["cls.predictions.bias"] + 1
        save_file(found, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=r"decoder\.bias should repeat"):
            phasor.load(tmp_path)

    @pytest.mark.parametrize(
        ("cls", "name", "tensor"),
        [
            (transformers.BertModel, "embeddings.position_ids", torch.arange(60)[None] + 2),
            (transformers.RoFormerModel, "encoder.embed_positions.weight", torch.zeros(60, 8)),
        ],
    )
    def test_positions_that_are_not_what_they_should_be_are_refused(self, tmp_path, cls, name, tensor):
        theirs_of(cls).save_pretrained(tmp_path)
        save_file(load_file(tmp_path / "model.safetensors") | {name: tensor}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=rf"{name} should follow from the configuration and does not"):
            phasor.load(tmp_path)

    @pytest.mark.parametrize(
        ("cls", "fields"),
        [
            (transformers.DistilBertModel, {"tie_weights_": True, "output_past": True, "sinusoidal_pos_embds": False}),
            (transformers.RobertaModel, {"position_embedding_type": "absolute", "classifier_dropout": 0.1}),
            (transformers.RoFormerModel, {n: v for n, v in OLD_CONFIG.items() if n != "architectures"}),
            (transformers.ModernBertModel, {"layer_norm_eps": 1e-5, "position_embedding_type": "absolute"}),
        ],
        ids=lambda given: "" if isinstance(given, dict) else given.__name__,
    )
    def test_fields_of_real_files_that_change_nothing(self, tmp_path, cls, fields):
        theirs_of(cls, pad_token_id=3).save_pretrained(tmp_path)
        before = phasor.load(tmp_path)(tokens(1, 9))
        rewritten(tmp_path, **fields)
        assert torch.equal(phasor.load(tmp_path)(tokens(1, 9)), before)

    def test_the_table_of_roformer_in_a_narrow_type(self, tmp_path):
        theirs_of(transformers.RoFormerModel).half().save_pretrained(tmp_path)
        assert phasor.load(tmp_path).tokens.weight.dtype == torch.float16

    @pytest.mark.parametrize(
        ("cls", "fields"),
        [
            (transformers.BertModel, {"position_embedding_type": "relative_key"}),
            (transformers.BertModel, {"is_decoder": True}),
            (transformers.BertModel, {"architectures": ["BertForQuestionAnswering"]}),
            (transformers.BertModel, {"hidden_act": "mish"}),
            (transformers.ModernBertModel, {"rope_theta": 500.0}),
            (transformers.ModernBertModel, {"head_dim": 10}),
            (transformers.ModernBertModel, {"layer_types": ["chunked_attention"] * 2}),
        ],
        ids=lambda given: next(iter(given)) if isinstance(given, dict) else given.__name__,
    )
    def test_what_is_not_honored_is_refused_by_name(self, tmp_path, cls, fields):
        theirs_of(cls, pad_token_id=0).save_pretrained(tmp_path)
        rewritten(tmp_path, **fields)
        name = "architecture" if "architectures" in fields else next(iter(fields))
        with pytest.raises(ValueError, match=name):
            phasor.load(tmp_path)

    @pytest.mark.parametrize("fields", [{"norm_type": "rms_norm"}, {"use_bias": False}], ids=str)
    def test_what_transformers_ignores_in_roformer_is_ignored(self, tmp_path, fields):
        """Fields of a RoFormer that is not in transformers; files of it lack tensors, and are refused for that."""
        theirs = theirs_of(transformers.RoFormerModel, pad_token_id=0)
        theirs.save_pretrained(tmp_path)
        rewritten(tmp_path, **fields)
        with pytest.warns(UserWarning, match=f"phasor ignores .*{next(iter(fields))}"):
            ours = phasor.load(tmp_path)
        text = tokens(1, 9)
        assert (ours(text) - theirs(text).last_hidden_state).abs().max() < NEAR


@pytest.mark.parametrize(
    "cls",
    [transformers.BertForPreTraining, transformers.RobertaForMaskedLM, transformers.DistilBertModel],
    ids=lambda cls: cls.__name__,
)
@pytest.mark.filterwarnings("ignore:tensors phasor has no use for")
def test_a_conversion_checks_itself(tmp_path, cls):
    theirs_of(cls, pad_token_id=3).save_pretrained(tmp_path / "theirs")
    there = phasor.convert(tmp_path / "theirs", tmp_path / "ours", check=True)
    back = phasor.convert(tmp_path / "ours", tmp_path / "again", check=True)
    assert max(there.largest, back.largest) <= NEAR


class TestRoberta:
    @torch.no_grad()
    def test_positions_count_real_tokens(self, tmp_path):
        theirs = theirs_of(transformers.RobertaForMaskedLM, pad_token_id=1)
        theirs.save_pretrained(tmp_path)
        ids = tokens(3, 20).clamp(min=2)
        real = torch.ones(3, 20, dtype=torch.bool)
        real[0, 15:], real[1, :6], real[2, :3], real[2, 17:] = False, False, False, False
        ids = torch.where(real, ids, 1)
        expected = theirs(ids, attention_mask=real.long()).logits
        ours = phasor.load(tmp_path)(ids, attention_mask=real)
        assert float((ours - expected)[real].abs().max()) <= NEAR

    def test_the_padding_token_that_positions_need_is_written(self, tmp_path):
        theirs_of(transformers.RobertaForMaskedLM, pad_token_id=1).save_pretrained(tmp_path)
        ours = phasor.load(tmp_path)
        ours.special = ours.special.replace(pad=5)
        phasor.save(ours, tmp_path / "again", format="hf")
        assert json.loads((tmp_path / "again/config.json").read_text())["pad_token_id"] == 1
        assert torch.equal(phasor.load(tmp_path / "again")(tokens(1, 9)), ours(tokens(1, 9)))


@torch.no_grad()
def test_roberta_counts_tokens_other_than_padding_where_no_mask_is_given(tmp_path):
    sizes = {"vocab_size": 60, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = transformers.RobertaConfig(**sizes, intermediate_size=40, max_position_embeddings=20, pad_token_id=3)
    theirs = transformers.RobertaForMaskedLM(config).eval()
    redraw(theirs, lambda buffer: False)
    theirs.save_pretrained(tmp_path)
    ours = phasor.load(tmp_path)
    tokens = torch.tensor([[5, 6, 3, 8, 9, 3], [3, 3, 7, 8, 3, 9], [5, 6, 7, 8, 9, 10]])
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=2e-5, rtol=0)
    real = tokens != 3
    positions = real.cumsum(-1) * real - 1
    torch.testing.assert_close(
        ours(tokens, positions=positions.clamp(min=0))[2], theirs(tokens).logits[2], atol=2e-5, rtol=0
    )


@pytest.mark.parametrize("types", [["full_attention"] * 2, ["full_attention", "sliding_attention"]])
def test_modernbert_has_rotary_parameters_of_its_layers_alone(tmp_path, types):
    theirs = theirs_of(transformers.ModernBertModel, layer_types=types, pad_token_id=0)
    theirs.save_pretrained(tmp_path / "theirs")
    phasor.save(phasor.load(tmp_path / "theirs"), tmp_path / "ours", format="hf")
    written = json.loads((tmp_path / "ours/config.json").read_text())["rope_parameters"]
    assert written.keys() == set(types)
    back = transformers.ModernBertModel.from_pretrained(tmp_path / "ours")
    assert back.config.rope_parameters == theirs.config.rope_parameters


@torch.no_grad()
def test_the_discriminator_of_electra_keeps_its_head(tmp_path):
    theirs = theirs_of(transformers.ElectraForPreTraining, embedding_size=10)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = phasor.load(tmp_path / "theirs")
    found, expected = ours(tokens(2, 9)), theirs.electra(tokens(2, 9)).last_hidden_state
    assert float((found - expected).abs().max()) <= NEAR
    phasor.save(ours, tmp_path / "ours", format="hf")
    back = transformers.ElectraForPreTraining.from_pretrained(tmp_path / "ours")
    assert back.config.architectures == ["ElectraForPreTraining"]
    before, after = theirs.state_dict(), back.state_dict()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


@torch.no_grad()
def test_token_dropout_goes_by_the_masked_tokens_of_each_document():
    config = tiny("rotary", shape="encoder", embedding={"mask_token": 7})
    model, ids = build(config).double(), tokens(1, 12)
    ids[ids == 7] = 8
    ids[0, [1, 2, 8]] = 7
    document_ids = torch.tensor([[0] * 5 + [1] * 7])
    apart = torch.cat([model(ids[:, :5]), model(ids[:, 5:])], dim=1)
    torch.testing.assert_close(model(ids, document_ids=document_ids), apart, rtol=0, atol=EXACT)
    padded, real = torch.nn.functional.pad(ids[:, :5], (0, 3)), torch.arange(8)[None] < 5
    torch.testing.assert_close(model(padded, attention_mask=real)[:, :5], apart[:, :5], rtol=0, atol=EXACT)


@torch.no_grad()
def test_esm_scales_tokens_by_those_that_are_not_masked(tmp_path):
    """Also in transformers where the share of masked tokens differs by row."""
    theirs = theirs_of(
        transformers.EsmForMaskedLM,
        position_embedding_type="rotary",
        token_dropout=True,
        mask_token_id=7,
        pad_token_id=1,
    )
    theirs.save_pretrained(tmp_path)
    ids = tokens(3, 15).clamp(min=8)
    ids[1, 3:9], ids[2, 5] = 7, 7
    found = phasor.load(tmp_path)(ids)
    assert float((found - theirs(ids).logits).abs().max()) <= NEAR
    assert float((found[1] - phasor.load(tmp_path)(ids[1:2].clamp(min=8))[0]).abs().max()) > 0.1


def test_frequencies_of_esm_that_do_not_follow_from_its_configuration_are_refused(tmp_path):
    theirs_of(transformers.EsmForMaskedLM, position_embedding_type="rotary", pad_token_id=1).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    rounded = {n: x.half().float() if n.endswith("inv_freq") else x for n, x in stored.items()}
    save_file(rounded, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="inv_freq should follow from the configuration and does not"):
        phasor.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"relative_attention": False}, "relative_attention = false"),
        ({"conv_kernel_size": 3}, "conv_kernel_size"),
        ({"pos_att_type": ["p2p"]}, "pos_att_type must list c2p, p2c or both"),
        ({"embedding_size": 10}, "embedding_size"),
    ],
)
def test_what_deberta_has_no_part_for_is_refused(tmp_path, change, message):
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
    theirs_of(transformers.DebertaV2Model, **relative).save_pretrained(tmp_path)
    rewritten(tmp_path, **change)
    with pytest.raises(ValueError, match=message):
        phasor.load(tmp_path)


@torch.no_grad()
def test_deberta_v3_is_read_without_its_heads_of_pretraining(tmp_path):
    """Published files name no architecture, and have heads that transformers leaves out."""
    relative = {"relative_attention": True, "pos_att_type": "p2c|c2p", "position_buckets": 8, "share_att_key": True}
    relative |= {"norm_rel_ebd": "layer_norm", "position_biased_input": False, "type_vocab_size": 0}
    theirs = theirs_of(transformers.DebertaV2Model, **relative)
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {f"deberta.{name}": tensor for name, tensor in tensors.items()}
    tensors |= {"lm_predictions.lm_head.bias": torch.zeros(60), "mask_predictions.dense.bias": torch.zeros(24)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({n: x for n, x in fields.items() if n != "architectures"}))
    found = phasor.load(tmp_path)(tokens(2, 9).clamp(max=59))
    expected = theirs(tokens(2, 9).clamp(max=59)).last_hidden_state
    assert float((found - expected).abs().max()) <= NEAR


def test_albert_with_several_layers_in_a_group_is_refused(tmp_path):
    theirs_of(transformers.AlbertModel, inner_group_num=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="inner_group_num = 2; it must be 1"):
        phasor.load(tmp_path)
