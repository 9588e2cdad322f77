"""Which kind of step drafts what: the drafter's own shape, as far as there is room for it, or a chain of a length."""

from dataclasses import replace

from slipstream.executors.cuda_graph.step import CHAIN_NODES, MOST_NODES, StepKind
from slipstream.speculation.lengths import Choice, LengthController
from slipstream.speculation.tree import TreeShape

_LENGTHS, _BUDGETS = (1, 3, 5, 7), (8, 16, 32)
"""Chains and budgets that are chosen among, up to the drafter's own: each is captured for every batch size."""


def whole_kind(plain: StepKind, shape: TreeShape | None) -> StepKind:
    """Return the step whose rows are drafted a shape, or as much of a tree as steps have room for.

    Args:
        plain: the step that drafts nothing.
        shape: None where there is no draft.
    """
    grown = shape
    if shape is not None and not is_chain(shape):
        grown = shape.within(MOST_NODES // plain.num_rows - 1)
    if grown is None:
        return replace(plain, follows=shape is not None)
    return replace(plain, num_drafted=grown.num_nodes - 1, tree=None if is_chain(grown) else grown)


def chosen_kind(plain: StepKind, choice: Choice, shape: TreeShape | None) -> StepKind | None:
    """Return the step that drafts what was chosen, out of a shape where that is a tree; None if it has no room."""
    tree = shape.within(choice.budget) if shape is not None and choice.budget else None
    if tree is not None and plain.num_rows * tree.num_nodes > MOST_NODES:
        return None
    follows = choice.follows and not choice.length
    return replace(plain, num_drafted=choice.num_drafted, follows=follows, tree=tree)


def choice_of(kind: StepKind) -> Choice:
    """Return what a step drafts."""
    if kind.tree is None:
        return Choice(kind.num_drafted, kind.extends)
    return Choice(kind.tree.depth, follows=True, budget=kind.num_drafted)


def controller_of(shape: TreeShape | None) -> LengthController | None:
    """Return what chooses among smaller drafts and the whole shape; None without a draft."""
    if shape is None:
        return None
    if is_chain(shape):
        return LengthController([*(length for length in _LENGTHS if length < shape.depth), shape.depth])
    chains = [length for length in _LENGTHS if length <= shape.depth]
    whole = shape.num_nodes - 1
    smaller = [] if shape.paths else [budget for budget in _BUDGETS if shape.depth < budget < whole]
    return LengthController(chains, [(shape.depth, budget) for budget in (*smaller, whole)])


def is_chain(shape: TreeShape) -> bool:
    """Tell whether a shape is drafted as a chain; a tree may happen to be one, and a very long chain is a tree."""
    return shape.width == 1 and not shape.paths and shape.is_chain and shape.num_nodes <= CHAIN_NODES
