import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import miles
from miles.config.schema import EvalDataset, RunConfig
from miles.config.walk import leaves, section_model

SECTION_OF_MODEL = {
    model.__name__: name
    for name, field in RunConfig.model_fields.items()
    if (model := section_model(field)) is not None
}
DERIVED = {"resources.py", "batch_math.py", "compute.py", "eval_settings.py"}
"""Modules of `miles.config` that compute what processes ask for; checks and explanations are no readers."""

OF_CHECKS = {"cluster.check_memory"}
"""Settings that say which checks are made, and so are read by checks alone."""


def reads_of(source: str) -> Iterator[str]:
    """Settings that a module reads: `rollout.seed` for `config.rollout.seed`, and `args.NAME` for the hooks' names.

    A parameter of type `OptimizerConfig` stands for the section `optimizer`, whatever its name is.
    """
    for scope, node in _scoped(ast.parse(source), {}):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = _last_name(node.value)
            owner = scope.get(owner, owner)
            yield f"{owner.lstrip('_')}.{node.attr}"


def _scoped(node: ast.AST, scope: dict[str, str]) -> Iterator[tuple[dict[str, str], ast.AST]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        annotated = [(a.arg, ast.unparse(a.annotation)) for a in node.args.args if a.annotation is not None]
        scope = {**scope, **{arg: SECTION_OF_MODEL[kind] for arg, kind in annotated if kind in SECTION_OF_MODEL}}
    yield scope, node
    for child in ast.iter_child_nodes(node):
        yield from _scoped(child, scope)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def all_reads() -> set[str]:
    root = Path(miles.__file__).parent
    files = [f for f in root.rglob("*.py") if f.parent.name != "config" or f.name in DERIVED]
    return {read for file in files for read in reads_of(file.read_text())}


def test_every_setting_has_a_reader_outside_the_configuration():
    found = all_reads()
    unread = [
        leaf.path
        for leaf in leaves(RunConfig)
        if leaf.path != "custom" and not {leaf.path, f"args.{leaf.attribute}"} & found
    ]
    assert unread == sorted(OF_CHECKS)


def test_every_setting_of_an_evaluation_dataset_has_a_reader():
    found = all_reads()
    assert [leaf.path for leaf in leaves(EvalDataset) if f"dataset.{leaf.path}" not in found] == []


@pytest.mark.parametrize(
    ("source", "read"),
    [
        ("x = self._config.rollout.seed", "rollout.seed"),
        ("def f(config: OptimizerConfig):\n    return config.lr", "optimizer.lr"),
        ("x = self.args.rollout_seed", "args.rollout_seed"),
        ("x = self._args.rollout_seed", "args.rollout_seed"),
    ],
)
def test_the_search_sees_each_way_to_read(source, read):
    assert read in set(reads_of(source))


def test_the_search_takes_neither_assignments_nor_equal_names_of_other_things():
    assert set(reads_of("a.seed = 1\nrollout = 2\nprint(sample.index)")) == {"sample.index"}
