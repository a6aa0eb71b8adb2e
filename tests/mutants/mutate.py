"""Mutants of a function: its text with one operator, constant, statement or call changed."""

import ast
import copy
from collections import Counter
from collections.abc import Iterator

OPERATORS = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
}
COMPARED = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
}
CALLED = {"min": "max", "max": "min", "sum": "mean", "mean": "sum", "sqrt": "abs"}
WORDS = {"sum": "mean", "stable": None, "left": "right"}
RANKS = {"get_rank": 0, "rank": 0, "get_world_size": 2, "world_size": 2}
UNWRAPPED = {"reversed", "sorted", "abs", "float", "argsort"}


def mutants(source: str) -> Iterator[tuple[str, str]]:
    """Of each mutant what was changed, `line: before → after`, and its whole text."""
    tree = ast.parse(source)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    seen, keys = {ast.unparse(tree)}, Counter()
    for node in ast.walk(tree):
        for change in changes(node):
            if isinstance(parents.get(node), ast.JoinedStr):
                continue
            memo: dict = {}
            copied = copy.deepcopy(tree, memo)
            replaced = _Replace(memo[id(node)], change).visit(copied)
            text = ast.unparse(ast.fix_missing_locations(replaced))
            if text not in seen:
                seen.add(text)
                before, after = (ast.unparse(each).partition("\n")[0] for each in (node, change))
                key = f"{node.lineno}: {before} → {after}"
                keys[key] += 1
                yield key if keys[key] == 1 else f"{key} ({keys[key]})", text


class _Replace(ast.NodeTransformer):
    def __init__(self, target, change):
        self.target, self.change = target, change

    def visit(self, node):
        return self.change if node is self.target else self.generic_visit(node)


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that may stand in the place of this one."""

    def other(**fields):
        changed = copy.deepcopy(node)
        for name, value in fields.items():
            setattr(changed, name, value)
        return changed

    match node:
        case ast.BinOp() if type(node.op) in OPERATORS:
            yield other(op=OPERATORS[type(node.op)]())
        case ast.AugAssign():
            if type(node.op) in OPERATORS:
                yield other(op=OPERATORS[type(node.op)]())
            target = copy.deepcopy(node.target)
            yield ast.Assign([target], copy.deepcopy(node.value), lineno=node.lineno)
            yield ast.Pass()
        case ast.Compare(ops=[op]):
            for kind in COMPARED.get(type(op), ()):
                yield other(ops=[kind()])
        case ast.BoolOp():
            yield other(op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
        case ast.UnaryOp():
            yield copy.deepcopy(node.operand)
        case ast.Constant(value=bool()):
            yield ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield ast.Constant(node.value + 1)
            yield ast.Constant(0 if node.value else -1)
        case ast.Constant(value=str()) if node.value in WORDS:
            yield ast.Constant(WORDS[node.value])
        case ast.IfExp():
            yield from (copy.deepcopy(node.body), copy.deepcopy(node.orelse))
        case ast.If():
            yield from (other(test=ast.Constant(is_true)) for is_true in (True, False))
        case ast.For():
            yield other(body=[*copy.deepcopy(node.body), ast.Break()])
        case ast.Slice():
            for name in ("lower", "upper", "step"):
                if getattr(node, name) is not None:
                    yield other(**{name: None})
        case ast.Return(value=ast.Tuple(elts=[first, second, *rest])):
            yield ast.Return(ast.Tuple([second, first, *rest], ast.Load()))
        case ast.Expr(value=ast.Call()) | ast.Assign():
            yield ast.Pass()
        case ast.Call():
            yield from of_call(node, other)


def of_call(node: ast.Call, other) -> Iterator[ast.AST]:
    """What may be in the place of a call."""
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if name in RANKS:
        yield ast.Constant(RANKS[name])
    if name in CALLED:
        func = copy.deepcopy(node.func)
        setattr(func, "attr" if isinstance(func, ast.Attribute) else "id", CALLED[name])
        yield other(func=func)
    if name in UNWRAPPED and len(node.args) == 1:
        yield copy.deepcopy(node.args[0])
    if len(node.args) == 2 and name not in ("min", "max"):
        yield other(args=copy.deepcopy(node.args[::-1]))
    for left_out in node.keywords:
        yield other(keywords=[each for each in node.keywords if each is not left_out])
