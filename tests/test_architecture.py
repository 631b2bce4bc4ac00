"""The ground everything stands on: layering, public names, light imports, small files."""

import ast
import dataclasses
import inspect
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import phasor
from phasor.config import AttentionConfig, Extension, PositionConfig
from phasor.config.schema import Config
from phasor.inspect.kinds import CHOICES
from phasor.nn.attention.base import AttentionContext

SOURCE = Path(phasor.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


def read_floors():
    """The diagram of CONTRIBUTING.md: sets of packages and modules, from those that import nothing of the others on."""
    text = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    diagram = text.partition("## Direction of imports")[2].split("```")[1].removeprefix("text\n")
    return [{name.strip() for name in group.split(",")} for group in diagram.split("->")]


FLOORS = read_floors()  # imports go down or stay on their floor, never up
ENTRANCES = {"__init__", "__main__"}  # the public names, and `python -m phasor`

HEAVY = {"torch", "numpy", "rich", "triton", "transformers", "tokenizers", "safetensors", "matplotlib"}

PUBLIC = """
ChatSession ChunkedConfig ClassifyConfig ConstantSchedule ConvolutionConfig CosineSchedule DataConfig DeepNormConfig
DenseConfig DilatedConfig DistillConfig DropoutConfig EmbedConfig EmbeddingConfig EncoderConfig Engine ExpertsConfig
FanInInitConfig FeedForwardConfig FrontEndConfig GEGLUConfig GEGLUTanhConfig GELUConfig GELUTanhConfig GLUConfig
Generated GenerationConfig InverseSqrtSchedule KVCache LanguageHeadConfig LayerConfig LayerNormConfig LinearSchedule
LoRAConfig MaskedHeadConfig MeshConfig MixtureSource ModelConfig NoHeadConfig NoNormConfig NormalInitConfig
OptimizerConfig OutputConfig ParallelConfig PooledHeadConfig PostConfig PreConfig PreferenceConfig RMSNormConfig
ReGLUConfig ReLUConfig ReLUSquaredConfig Recipe Record Rotary SandwichConfig SaveConfig SequenceClassifierConfig
SiLUConfig SpecialTokens StableSchedule StridedConfig SwiGLUClampedConfig SwiGLUConfig T5InitConfig
TokenClassifierConfig TopKConfig TrainConfig Transformer XIELUConfig XavierInitConfig add_adapter backends
balancing_loss chat convert disable_adapters evaluate exact_rotary explain generate kinds load merge preset quantize
save set_adapters stream train translate verify
""".split()  # noqa: SIM905


def room(path):
    """The first name below phasor/ on the way to a file."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def floor(name):
    return next(i for i, rooms in enumerate([*FLOORS, {name}]) if name in rooms)


def imported_rooms(path, text):
    """The rooms of phasor that a file imports from, wherever in it the import stands; "" is phasor itself."""
    package = ("phasor", *path.relative_to(SOURCE).parent.parts)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (start, node.module) if part)
            modules = [f"phasor.{alias.name}" for alias in node.names] if module == "phasor" else [module]
        else:
            continue
        for module in modules:
            first, _, rest = module.partition(".")
            if first == "phasor":
                inside = rest.partition(".")[0]
                yield inside if (SOURCE / inside).is_dir() or (SOURCE / f"{inside}.py").exists() else ""


@cache
def edges():
    """(room, imported room, file) for every import between rooms."""
    return [
        (room(path), other, str(path.relative_to(SOURCE)))
        for path in FILES
        if room(path) not in ENTRANCES
        for other in set(imported_rooms(path, path.read_text()))
        if other != room(path)
    ]


def test_every_room_has_a_floor():
    homeless = {room(path) for path in FILES} - ENTRANCES - set().union(*FLOORS)
    assert not homeless, f"add to the diagram in CONTRIBUTING.md, section 'Direction of imports': {homeless}"
    gone = set().union(*FLOORS) - {room(path) for path in FILES}
    assert not gone, f"the diagram in CONTRIBUTING.md names what is not there: {gone}"


def test_no_import_goes_up():
    assert not [edge for edge in edges() if edge[1] and floor(edge[1]) > floor(edge[0])]


def test_rooms_do_not_import_the_public_names():
    """They would close a circle through phasor/__init__."""
    assert not [file for _, other, file in edges() if not other]


def test_rooms_do_not_import_each_other_in_a_circle():
    below = {}
    for here, other, _ in edges():
        below.setdefault(here, set()).add(other)

    def reach(start, seen=frozenset()):
        for other in below.get(start, set()) - seen:
            seen = reach(other, seen | {other})
        return seen

    assert not [name for name in below if name in reach(name)]


def test_folders_are_written_by_one_class():
    """Only files.py and artifacts.py rename what is written, and take locks."""
    calls = {"os.replace", "os.rename", "replace_folder", "lock"}
    for path in FILES:
        if room(path) not in ("files", "artifacts"):
            nodes = ast.walk(ast.parse(path.read_text()))
            assert not calls & {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}, path


def imported_modules(path, modules):
    """The modules among `modules` that a file imports, wherever in it the import is; a package is its `__init__`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & modules
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                inside = f"{node.module}.{alias.name}"
                yield inside if inside in modules else node.module


def test_modules_of_ops_do_not_import_each_other_in_a_cycle():
    """Imports inside of functions count too."""
    paths = {path.with_suffix(""): path for path in FILES if room(path) == "ops"}
    names = {}
    for stem, path in paths.items():
        parts = stem.relative_to(SOURCE.parent).parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    imports = {name: set(imported_modules(path, names.keys())) & names.keys() for name, path in names.items()}
    assert imports["phasor.ops.attention.flash"] >= {"phasor.ops.attention.flash_launch", "phasor.ops.dispatch"}

    def cycle(name, trail):
        if name in trail:
            return trail[trail.index(name) :]
        if name not in acyclic:
            for other in imports[name]:
                found = cycle(other, [*trail, name])
                if found:
                    return found
            acyclic.add(name)
        return []

    acyclic = set()
    for name in names:
        assert not cycle(name, [])


@pytest.mark.parametrize(
    ("text", "rooms"),
    [
        ("import phasor.transformer", ["transformer"]),
        ("from phasor.nn.norm import RMSNorm", ["nn"]),
        ("from phasor import models, __version__", ["models", ""]),
        ("def f():\n    from phasor.cli import main", ["cli"]),
        ("from ..transformer import Stack", ["transformer"]),
        ("from . import norm", ["nn"]),
        ("import torch, phasor", [""]),
    ],
)
def test_the_layering_test_sees_every_form_of_import(text, rooms):
    assert list(imported_rooms(SOURCE / "nn" / "attention.py", text)) == rooms


# The configurations of position schemes and extensions are found in their folders: these at least.
PUBLIC_POSITIONS = """
ALiBiConfig AxialConfig CountingConfig DynamicNTKScaling DynamicYaRN LearnedConfig LinearScaling Llama3Scaling LongRoPE
MultiSectionConfig NTKScaling NoPositionConfig NormalizedConfig ProportionalScaling RotaryConfig SinusoidalConfig
T5PositionConfig XPosConfig YaRN
""".split()  # noqa: SIM905


def test_public_names_are_these():
    found = {cls.__name__ for base in (PositionConfig, Extension, AttentionConfig) for cls in base.kinds.values()}
    assert {*PUBLIC_POSITIONS, "SoftmaxAttentionConfig"} <= found
    assert sorted(phasor.__all__) == sorted([*PUBLIC, *found])
    assert set(phasor.__all__) <= set(dir(phasor))


@pytest.mark.parametrize(("group", "choice"), [("positions", PositionConfig), ("attention", AttentionConfig)])
def test_each_kind_is_a_folder_named_after_it(group, choice):
    folders = {p.parent.name for p in (SOURCE / "nn" / group).glob("*/config.py")}
    assert folders == {kind.replace("-", "_") for kind in phasor.kinds(group)}
    for kind, cls in choice.kinds.items():
        folder = kind.replace("-", "_")
        assert cls.__module__ == f"phasor.nn.{group}.{folder}.config"
        assert (SOURCE / "nn" / group / folder / "module.py").exists()


@pytest.mark.parametrize("name", phasor.__all__)
def test_public_name_resolves_and_says_what_it_is(name):
    thing = getattr(phasor, name)
    own = thing.__dict__.get("__doc__") if isinstance(thing, type) else thing.__doc__
    assert own
    assert own.strip()
    assert not own.startswith(f"{name}("), "a dataclass's signature is not a docstring"
    if not (isinstance(thing, type) and issubclass(thing, Config)):
        assert ">>>" in (inspect.getdoc(thing) or ""), f"{name} shows no example"


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="Transformr"):
        phasor.Transformr  # noqa: B018


def modules_after(code):
    """The modules that a fresh interpreter has loaded after running some code."""
    report = "\nimport sys\nmodules = sorted(sys.modules)\nimport json\nprint(json.dumps(modules))"
    done = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def loaded_by(code):
    """The heavy packages that a fresh interpreter has loaded after running some code."""
    return HEAVY & {name.partition(".")[0] for name in modules_after(code)}


def command(*words):
    return f"""
import runpy, sys
sys.argv = ["phasor", *{words!r}]
try:
    runpy.run_module("phasor", run_name="__main__")
except SystemExit as end:
    assert not end.code, end.code
"""


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import phasor", set()),
        ("import phasor; dir(phasor); phasor.__version__", set()),
        ("from phasor.config import ModelConfig; ModelConfig(vocab_size=9, dim=8, num_layers=1, num_heads=1)", set()),
        ("import phasor; phasor.kinds('positions')", set()),
        ("import phasor; phasor.preset('llama-3.1').to_json()", set()),
        ("import phasor; phasor.YaRN(factor=8, original_length=4096).frequencies(10000.0, 64)", set()),
        (command("--help"), set()),
        (command("train", "--help"), set()),
        (command("kinds", "positions", "--json"), set()),
        (command("plan", "--model", "preset:llama-3.1", "--devices", "64", "--json"), set()),
        ("import phasor; phasor.Transformer", {"torch", "numpy", "safetensors"}),
        ("import phasor; phasor.Rotary", {"torch", "numpy"}),
    ],
    ids=[
        "phasor",
        "names",
        "config",
        "kinds",
        "preset",
        "extension",
        "help",
        "train-help",
        "kinds-command",
        "plan-command",
        "model",
        "rotary",
    ],
)
def test_imports_are_light(code, allowed):
    assert loaded_by(code) <= allowed


# Modules of the standard library, of which each would be a tenth or more of the time until the help is there.
SLOW = {"asyncio", "dataclasses", "email", "http", "importlib.metadata", "inspect", "multiprocessing", "subprocess"}


@pytest.mark.parametrize(
    ("code", "rooms"),
    [("import phasor", {"distribution"}), (command("--help"), {"cli", "distribution", "progress", "torchrun"})],
    ids=["import", "help"],
)
def test_start_up_loads_few_modules(code, rooms):
    loaded = modules_after(code) - modules_after("")  # some installations load modules by themselves
    assert {name.split(".")[1] for name in loaded if name.startswith("phasor.")} == rooms
    assert not loaded & SLOW


# Where schemes have their names: they are defined, chosen, compared with others, or the only subject.
NAMES_SCHEMES = (
    *("nn/positions/", "models/families/", "models/presets.py", "recipes/", "__init__.py"),
    *("models/rope.py", "models/layer_types.py", "models/family.py", "checkpoints/hf.py"),  # what families share
    *("evaluation/compare/settings.py", "evaluation/compare/questions.py", "cli/compare.py"),
    *("bench/", "inspect/kinds.py"),
    *("inspect/audit/", "inspect/doctor/"),  # rope types of other engines, angles that are tested
    *("checkpoints/exact_rotary.py", "lab/rotary_model.py", "lab/views/"),
    *("lab/angle_errors.py", "lab/float_angles.py", "lab/two_words.py"),
)
SCHEMES = {kind: cls.__name__ for kind, cls in PositionConfig.kinds.items() if kind != "combined"}  # one, not several
OTHER_KINDS = {kind for base in CHOICES.values() if base is not PositionConfig for kind in base.kinds}
KINDS = SCHEMES.keys() - OTHER_KINDS
LITERALS = KINDS - {"learned", "temperature"}  # words for other things too


def compared_kinds(tree):
    """The constants that a kind is compared with."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            if any(getattr(side, "attr", getattr(side, "id", "")) == "kind" for side in sides):
                yield from (
                    value.value for side in sides for value in ast.walk(side) if isinstance(value, ast.Constant)
                )


def imported_kinds(tree, package):
    """The folders of a package that a file imports from, and what it imports from there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package):
            yield from (*node.module.split("."), *(alias.name for alias in node.names))


def named_schemes(text):
    """The schemes that a file imports, has as literals, or compares a kind with."""
    tree = ast.parse(text)
    literals = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    imported = {*SCHEMES.keys(), *SCHEMES.values()}.intersection(imported_kinds(tree, "phasor.nn.positions"))
    return literals & LITERALS | imported | KINDS.intersection(compared_kinds(tree))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('scale = 1.0 if scheme.kind == "learned" else 2.0', {"learned"}),
        ("from phasor.nn.positions import LearnedConfig", {"LearnedConfig"}),
        ("from phasor.nn.positions.sinusoidal.module import Sinusoidal", {"sinusoidal"}),
        ('shown["rotary"] = []', {"rotary"}),
        ('parts["learned"], options["temperature"] = True, 1.0', set()),
    ],
)
def test_names_of_schemes_are_found(text, names):
    assert named_schemes(text) == names


def test_nothing_outside_its_folder_names_a_scheme():
    others = [path for path in FILES if not path.relative_to(SOURCE).as_posix().startswith(NAMES_SCHEMES)]
    assert {str(path): found for path in others if (found := named_schemes(path.read_text()))} == {}


# Where kinds of attention have their names: they are defined, chosen, converted, compared or timed.
NAMES_ATTENTION = (
    *("nn/attention/", "models/families/", "models/presets.py", "models/layout.py", "models/entries.py"),
    *("config/model.py", "bench/", "inspect/kinds.py", "__init__.py"),
)
ATTENTION_FOLDERS = {kind.replace("-", "_") for kind in AttentionConfig.kinds}


def named_attention(text):
    """The kinds of attention that a file imports, or compares a kind with."""
    tree = ast.parse(text)
    imported = ATTENTION_FOLDERS.intersection(imported_kinds(tree, "phasor.nn.attention"))
    return imported | AttentionConfig.kinds.keys() & set(compared_kinds(tree)) - {"none"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('x = 1 if config.attention.kind == "latent" else 2', {"latent"}),
        ("from phasor.nn.attention.softmax.module import SoftmaxAttention", {"softmax"}),
        ("from phasor.nn.attention.base import Attention", set()),
    ],
)
def test_names_of_kinds_of_attention_are_found(text, names):
    assert named_attention(text) == names


def test_nothing_outside_its_folder_names_a_kind_of_attention():
    others = [path for path in FILES if not path.relative_to(SOURCE).as_posix().startswith(NAMES_ATTENTION)]
    assert {str(path): found for path in others if (found := named_attention(path.read_text()))} == {}


PRIVATE_METHODS = {"_dynamo_marked_constant", "_flatten"}  # of objects that the code has no dotted name for


def private_names(text):
    """The private names of torch that a file imports, or takes of what it imports."""
    tree, imported, found = ast.parse(text), {"torch": "torch"}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            found |= {node.attr} & PRIVATE_METHODS
            found |= {f"{imported[first]}.{rest}"} if first in imported and "(" not in rest else set()
    named = found | set(imported.values())
    return {name for name in named if re.search(r"(^|\.)_[a-zA-Z]", name)}


def test_private_names_of_torch_are_found():
    text = (
        "from torch.distributed import mesh as m\nimport torch\ntorch.add(m.DeviceMesh._of, torch._C.Key)\nx._flatten()"
    )
    assert private_names(text) == {"torch.distributed.mesh.DeviceMesh._of", "torch._C", "torch._C.Key", "_flatten"}


def test_private_interfaces_of_torch_have_a_reason():
    page = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = page.partition("### Private interfaces of torch")[2].partition("\n## ")[0].splitlines()
    listed = {name for row in rows if row.startswith("| `") for name in re.findall(r"`(.+?)`", row.split("|")[1])}
    used = {name for path in FILES for name in private_names(path.read_text())}

    def begins(name, start):
        return f"{name}.".startswith(f"{start}.")

    assert not {name for name in used if not any(begins(name, one) or begins(one, name) for one in listed)}
    assert not {one for one in listed if not any(begins(name, one) for name in used)}


def test_attention_takes_few_things_besides_its_input():
    """What belongs to a scheme is in what it prepared, and not in a field that all others carry along."""
    assert len(dataclasses.fields(AttentionContext)) <= 8


def test_source_files_are_small_and_say_what_they_are():
    texts = {str(path.relative_to(SOURCE)): path.read_text() for path in FILES}
    assert {name: lines for name, text in texts.items() if (lines := len(text.splitlines())) > 500} == {}
    vague = ("utils.py", "util.py", "helpers.py", "misc.py", "common.py")
    assert not [name for name in texts if Path(name).name in vague]
    assert not [name for name, text in texts.items() if text.strip() and not ast.get_docstring(ast.parse(text))]


def test_the_package_is_typed():
    assert (SOURCE / "py.typed").exists()
