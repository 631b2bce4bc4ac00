"""`audit`: what other engines will make of the rotary settings of a folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasor.config.schema import json_value
from phasor.config.text_files import path_of
from phasor.inspect.audit import extensions, layers, places
from phasor.inspect.audit.finding import SEVERITIES, Finding
from phasor.inspect.audit.settings import RopeConfig

Rule = Callable[[RopeConfig], Iterator[Finding]]
RULES: tuple[Rule, ...] = (*places.RULES, *extensions.RULES, *layers.RULES)


@dataclass(frozen=True)
class Audit:
    """The findings about a folder, the gravest first."""

    name: str
    findings: tuple[Finding, ...]

    @property
    def has_errors(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, for JSON."""
        return json_value(self)


def audit(folder: str | Path) -> Audit:
    """What engines that were seen to read rotary settings in their own ways make of those of a Hugging Face folder.

    It is given by its path, by that of a config.json, or by a name on the hub. Each finding names the field, what
    differs, what to write instead, and reports of it. Nothing is computed, and no other package is needed.

    >>> import json, tempfile
    >>> rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    >>> config = {"model_type": "qwen3", "max_position_embeddings": 32768, "rope_scaling": rope}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "config.json")
    ...     _ = file.write_text(json.dumps(config))
    ...     found = audit(folder)
    >>> found.findings[0].severity, found.findings[0].field, found.findings[0].seen[0]
    ('error', 'rope_scaling.factor', 'huggingface/transformers#38224')
    """
    from phasor.checkpoints.folder import CONFIG, read_json
    from phasor.checkpoints.hub import resolve_folder
    from phasor.checkpoints.text_part import text_object

    path = path_of(folder)
    if not path.is_file():
        path = resolve_folder(folder, files="config") / CONFIG
    data = read_json(path)
    if "model_type" not in data:
        raise ValueError(f"{path} is no Hugging Face configuration: an audit is of what save(format='hf') writes")
    try:
        return Audit(str(folder), tuple(find(RopeConfig.read(text_object(data) or data))))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def find(rope: RopeConfig) -> list[Finding]:
    """The findings about rotary settings, the gravest first."""
    found = [finding for rule in RULES for finding in rule(rope)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
