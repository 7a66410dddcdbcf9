"""Finds the changes of one place of a source that mutants.py tries, for Python, C++ and CUDA.

A condition becomes true or false, and a conditional expression one of its branches. A comparison, a sign, min, max, 0,
1, true and false become their neighbour or opposite. An operand, an item, a call's name, or a statement of one line is
dropped. Two arguments are swapped. Texts, declarations, annotations, imports and preprocessor lines stay as they are.
"""

import ast
import re
from collections import Counter
from typing import Iterator, List, NamedTuple

PAIRS = ("< <=", "> >=", "== !=", "+ -", "&& ||", "& |", "<< >>", "+= -=", "0 1", "true false", "min max", "any all",
         "minimum maximum", "amin amax", "zeros ones", "zeros_like ones_like", "new_zeros new_ones")
FLIPPED = {a: b for pair in PAIRS for a, b in (pair.split(), pair.split()[::-1])}


class Edit(NamedTuple):
    start: int
    end: int
    new: str
    operator: str


def edits(name: str, source: str) -> List[Edit]:
    """Returns the edits of a source. The end of its name says the language; in Markdown, blocks of Python are
    edited."""
    if name.endswith(".md"):
        found = [Edit(block.start(1) + start, block.start(1) + end, new, operator)
                 for block in re.finditer(r"^```python\n(.*?)^```", source, re.M | re.S)
                 for start, end, new, operator in of_python(block[1])]
    else:
        found = list((of_python if name.endswith(".py") else Cpp)(source))
    return sorted({edit[:3]: edit for edit in reversed(found) if source[edit.start:edit.end] != edit.new}.values())


# The signs of Python, the statements that are dropped, the fields that stay as they are, and the calls whose arguments
# stay.
SIGNS = {a: b for pair in ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot),
                           (ast.In, ast.NotIn), (ast.Add, ast.Sub), (ast.BitAnd, ast.BitOr), (ast.And, ast.Or))
         for a, b in (pair, pair[::-1])}
DROPPED = (ast.AugAssign, ast.Delete, ast.Raise, ast.Assert, ast.Continue, ast.Break)
KEPT = ("annotation", "returns", "decorator_list", "exc", "msg")
PLAIN_CALLS = ("isinstance", "len", "super", "type", "getattr", "hasattr")


def of_python(source: str) -> Iterator[Edit]:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # an excerpt in a page
        return
    lines = [0]
    for line in source.encode().split(b"\n"):
        lines.append(lines[-1] + len(line) + 1)
    ascii_only = source.isascii()

    def place(line: int, column: int) -> int:
        at = lines[line - 1] + column
        return at if ascii_only else len(source.encode()[:at].decode())

    modules = {name.asname or name.name.split(".")[0] for node in ast.walk(tree)
               if isinstance(node, (ast.Import, ast.ImportFrom)) for name in node.names} | {"self", "cls"}
    todo = [(tree, Counter())]
    while todo:
        node, bound = todo.pop()
        if isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom)):
            continue
        if isinstance(node, ast.FunctionDef):  # how often it gives each name a value
            bound = Counter(n.arg if isinstance(n, ast.arg) else n.id for n in ast.walk(node) if isinstance(n, ast.arg)
                            or isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        names = {n.id for target in getattr(node, "targets", ()) for n in ast.walk(target)
                 if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        if (isinstance(node, DROPPED) or isinstance(node, ast.Return) and node.value is None
                or isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
                or isinstance(node, ast.Assign) and bound and all(bound[name] > 1 for name in names)):
            yield Edit(place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset), "pass",
                       "drop a statement")
        for of, new, operator in changes(node, modules):
            text = new if isinstance(new, str) else f"({ast.unparse(ast.fix_missing_locations(new))})"
            yield Edit(place(of.lineno, of.col_offset), place(of.end_lineno, of.end_col_offset), text, operator)
        for name, value in ast.iter_fields(node):
            if name not in KEPT:
                todo.extend((child, bound) for child in (value if isinstance(value, list) else [value])
                            if isinstance(child, ast.AST))


def changes(node: ast.AST, modules: set) -> Iterator[tuple]:
    """Yields (old, new, operator) for a node of Python; `new` is a node or a text."""
    def but(**fields):
        return type(node)(**{**dict(ast.iter_fields(node)), **fields})

    def without(items, i):
        return items[:i] + items[i + 1:]

    if isinstance(node, (ast.If, ast.While)):
        yield node.test, "False", "condition"
        if isinstance(node, ast.If) and not isinstance(node.body[0], ast.Raise):
            yield node.test, "True", "condition"
    elif isinstance(node, ast.comprehension):
        yield from ((test, "True", "condition") for test in node.ifs)
    elif isinstance(node, ast.IfExp):
        yield from ((node, branch, "branch") for branch in (node.body, node.orelse))
    elif isinstance(node, ast.For):
        yield node.iter, "()", "drop a loop"
    elif isinstance(node, ast.With):
        yield from ((item.context_expr, "__import__('contextlib').nullcontext()", "drop a context")
                    for item in node.items if not item.optional_vars)
    elif isinstance(node, ast.ExceptHandler) and node.type:
        yield node.type, "()", "drop a handler"
    elif isinstance(node, ast.Compare):
        for i, sign in enumerate(node.ops):
            yield node, but(ops=[*node.ops[:i], SIGNS[type(sign)](), *node.ops[i + 1:]]), "flip"
        if len(node.ops) > 1:
            rest = node.comparators
            yield node, but(left=rest[0], ops=node.ops[1:], comparators=rest[1:]), "drop an operand"
            yield node, but(ops=node.ops[:-1], comparators=rest[:-1]), "drop an operand"
    elif isinstance(node, ast.BoolOp):
        for i in range(len(node.values)):
            yield node, but(values=without(node.values, i)), "drop an operand"
        yield node, but(op=SIGNS[type(node.op)]()), "flip"
    elif isinstance(node, ast.BinOp):
        yield from ((node, operand, "drop an operand") for operand in (node.left, node.right))
        if type(node.op) in SIGNS:
            yield node, but(op=SIGNS[type(node.op)]()), "flip"
    elif isinstance(node, ast.UnaryOp):
        yield node, node.operand, "drop a sign"
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)):
        new = not node.value if isinstance(node.value, bool) else FLIPPED.get(str(node.value), node.value + 1)
        yield node, str(new), "constant"
    elif isinstance(node, ast.Slice):
        yield from ((bound, "", "drop an operand") for bound in (node.lower, node.upper) if bound)
    elif isinstance(node, (ast.List, ast.Tuple, ast.Set)) and not isinstance(getattr(node, "ctx", None), ast.Store):
        if not any(isinstance(item, ast.Slice) for item in node.elts):
            yield from ((node, but(elts=without(node.elts, i)), "drop an item") for i in range(len(node.elts)))
    elif isinstance(node, ast.Dict):
        for i in range(len(node.keys)):
            yield node, but(keys=without(node.keys, i), values=without(node.values, i)), "drop an item"
    elif isinstance(node, ast.Call):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name == "range":
            yield node.args[-1], ast.BinOp(node.args[-1], ast.Sub(), ast.Constant(1)), "off by one"
        elif name not in PLAIN_CALLS:
            yield from call_changes(node, name, modules, but, without)


def call_changes(node: ast.Call, name: str, modules: set, but, without) -> Iterator[tuple]:
    of, arguments = getattr(node.func, "value", None), node.args
    if name in FLIPPED:
        yield node, but(func=ast.Attribute(of, FLIPPED[name]) if of else ast.Name(FLIPPED[name])), "flip"
    if of and getattr(of, "id", None) not in modules:
        yield node, of, "drop a call"
    for i, value in enumerate(arguments):
        if not isinstance(value, (ast.Starred, ast.Constant)):
            yield node, value, "drop a call"
        if isinstance(value, ast.Starred) or 0 < i == len(arguments) - 1:
            yield node, but(args=without(arguments, i)), "drop an item"
        if i > 0:
            yield node, but(args=[*arguments[:i - 1], value, arguments[i - 1], *arguments[i + 1:]]), "swap"
    for i in range(len(node.keywords)):
        yield node, but(keywords=without(node.keywords, i)), "drop an item"


TOKEN = re.compile(r"""(?P<skipped> //[^\n]* | /\*.*?\*/ | ^[ \t]*\#(?:[^\n]*\\\n)*[^\n]* | \s+
        | template\ <(?:[^<>]|<(?:[^<>]|<[^<>]*>)*>)*> | \[\[\w+\]\] )
    | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*' | [A-Za-z_]\w* | \.?\d[\w.]* | (?<=\ )(?:<<|>>)=?(?=\s) | ->|::|\+\+|--|&&
    | \|\| | [-+*/%&|^<>=!]= | .""", re.X | re.S | re.M)
BRACKETS = {")": "(", "}": "{", "]": "[", ">": "<"}
# Operators from the weakest to the strongest; words and separators are weaker than all.
LEVELS = ((",", ";", "return", "throw", "else", "case"), ("=", "+=", "-=", "*=", "/=", "|=", "&=", "^=", "<<=", ">>="),
          ("?", ":"), ("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<", "<=", ">", ">="), ("<<", ">>"),
          ("+", "-"), ("*", "/", "%"))
LEVEL = {sign: level for level, signs in enumerate(LEVELS) for sign in signs}
LOGICAL = (3, 4, 8, 9)
CONTROLS = ("if", "for", "while", "switch")
# What may precede a statement, and how it ends.
PREFIXES = {**dict.fromkeys(CONTROLS, "("), "else": "else", "do": "do",
            **dict.fromkeys(("case", "default", "public", "private"), ":")}
CASTS = re.compile(r"\w+_t|float|double|int|bool|\w+_cast|sizeof|decltype|[A-Z]\w*")
NO_STATEMENTS = ("using", "typedef", "static_assert", "friend", "struct", "class", "enum", "namespace", "return")


class Cpp:
    """Iterates over the edits of C++ as clang-format writes it: operators with two operands have spaces, and templates
    do not."""

    def __init__(self, source: str):
        self.source, self.tokens, self.match = source, [], {}
        self.of_heads = set()  # the semicolons in the heads of loops
        stack: List[int] = []
        for found in TOKEN.finditer(source):
            if found["skipped"]:
                continue
            text, i = found[0], len(self.tokens)
            before, after = source[found.start() - 1], source[found.end():found.end() + 1]
            self.tokens.append((text, found.start(), found.end()))
            if text in ("(", "{", "[") or text == "<" and (before.isalnum() or before == "_") and not after.isspace():
                stack.append(i)
            elif text == ";" and stack and self.word(stack[-1]) == "(":
                self.of_heads.add(i)
            elif text in BRACKETS and (text != ">" or stack and self.word(stack[-1]) == "<"):
                while self.word(stack[-1]) == "<" != BRACKETS[text]:  # it compares
                    stack.pop()
                self.match[i] = stack.pop()
                self.match[self.match[i]] = i

    def __iter__(self) -> Iterator[Edit]:
        for i, (text, start, end) in enumerate(self.tokens):
            before, after = self.word(i - 1), self.word(i + 1)
            if text in CONTROLS and (after == "(" or after == "constexpr"):
                yield from self.of_control(text, i + 1 + (after == "constexpr"))
            elif text == ";" and i not in self.of_heads:
                yield from self.of_statement(i)
            elif text == "(" and i in self.match and (self.is_name(i - 1) or before == ">" and i - 1 in self.match):
                yield from self.of_call(i)
            elif text == "[" and self.is_name(i - 1) and self.match[i] > i + 1:
                yield Edit(start, self.tokens[self.match[i]][2], "[0]", "constant")
            elif text == "?":
                yield from self.of_branches(i)
            elif text in LEVEL and LEVEL[text] > 2 and i not in self.match and self.spaced(i):
                yield from self.of_operands(i, LEVEL[text])
            elif text in ("!", "-", "~"):
                yield Edit(start, end, "", "drop a sign")
            elif text in ("++", "--") and not (self.is_name(i + 1) or after in ("*", "(")):
                yield Edit(start, end, "", "drop a sign")
            elif text in ("true", "false") or text[0].isdigit():
                yield Edit(start, end, FLIPPED.get(text, str(int(text) + 1) if text.isdigit() else "0"), "constant")
            elif text in FLIPPED and self.is_name(i) and after in ("(", "<"):
                yield Edit(start, end, FLIPPED[text], "flip")
            elif text == "bool" and self.word(i + 2) == "=":
                for value in ("false", "true"):
                    yield self.edit(i + 3, self.extent(i + 2, 1, 1), value, "condition")

    def word(self, i: int) -> str:
        return self.tokens[i][0] if 0 <= i < len(self.tokens) else ""

    def is_name(self, i: int) -> bool:
        word = self.word(i)
        return word not in (*LEVEL, *CONTROLS, "constexpr") and (word[:1].isalpha() or word[:1] == "_")

    def spaced(self, i: int) -> bool:
        _, start, end = self.tokens[i]
        return self.source[start - 1].isspace() and self.source[end].isspace()

    def text(self, first: int, last: int) -> str:
        return self.source[self.tokens[first][1]:self.tokens[last][2]]

    def edit(self, first: int, last: int, new: str, operator: str) -> Edit:
        return Edit(self.tokens[first][1], self.tokens[last][2], new, operator)

    def extent(self, i: int, step: int, level: int) -> int:
        """Returns the last token, left or right of token i, before an operator that is weaker than `level`."""
        while 0 <= i + step < len(self.tokens):
            k = i + step
            if k in self.match:
                if (self.match[k] > k) != (step > 0):
                    break
                k = self.match[k]
            elif LEVEL.get(self.word(k), 99) < level + (step > 0) and (LEVEL[self.word(k)] < 3 or self.spaced(k)):
                break
            i = k
        return i

    def top(self, first: int, last: int) -> Iterator[int]:
        """Yields the tokens of a range, and not those in brackets."""
        while first <= last:
            yield first
            first = self.match.get(first, first) + 1

    def parts(self, first: int, last: int) -> list:
        """Returns (first, last) of each non-empty part between the commas of a range of tokens."""
        commas = [first - 1, *[k for k in self.top(first, last) if self.word(k) == ","], last + 1]
        return [(a + 1, b - 1) for a, b in zip(commas, commas[1:]) if a + 1 < b]

    def declares(self, first: int, last: int) -> bool:
        """Returns True if a name follows a type."""
        before = False
        for i in self.top(first, last):
            if self.word(i) in (*LEVELS[1], "(", "?") or before and self.is_name(i):
                return self.is_name(i)
            pointer = self.word(i) in ("*", "&", "&&") and i > first and not self.spaced(i)
            before = pointer or i in self.match or self.is_name(i) and self.word(i) not in ("template", "new")
        return False

    def of_control(self, word: str, i: int) -> Iterator[Edit]:
        first, last = i + 1, self.match[i] - 1
        for k in self.top(first, last):
            if word == "for" and self.word(k) in ("<", "+=") and k not in self.match:
                at, new = (self.tokens[k - 1][2], " + 1") if self.word(k) == "<" else (self.tokens[k][2], " 2 *")
                yield Edit(at, at, new, "off by one")
            elif self.word(k) == ";":
                first = k + 1
        for value in {"if": ("false", "true"), "while": ("false",)}.get(word, ()):
            yield self.edit(first, last, value, "condition")

    def of_statement(self, end: int) -> Iterator[Edit]:
        first, last = end, end - 1
        while first > 0 and self.word(first - 1) != ";" and self.match.get(first - 1, 0) < first and not (
                self.word(first - 1) == "}" and self.word(first) not in (";", ",", ")", ".", "(")):
            first = self.match.get(first - 1, first - 1)
        while self.word(first) in PREFIXES:
            mark = PREFIXES[self.word(first)]
            at = next((k for k in range(first, last) if self.word(k) == mark), last)
            first = self.match.get(at, at) + 1
        if first > last or self.word(first) in NO_STATEMENTS and first < last or self.declares(first, last):
            return
        barrier = re.search("sync|fence", self.text(first, last))
        yield self.edit(first, last, "", "drop a barrier" if barrier else "drop a statement")
        for k in self.top(first, last):
            if self.word(k) in LEVELS[1][1:]:
                yield self.edit(k, k, FLIPPED.get(self.word(k), "="), "flip")
                yield self.edit(k, k, "=", "flip")
        parts = self.parts(first, last)
        if len(parts) > 1:
            yield Edit(self.tokens[first][1], self.tokens[parts[1][0]][1], "", "drop a statement")
            for (_, a), (_, b) in zip(parts, parts[1:]):
                yield Edit(self.tokens[a][2], self.tokens[b][2], "", "drop a statement")

    def of_call(self, i: int) -> Iterator[Edit]:
        parts = self.parts(i + 1, self.match[i] - 1)
        if any(self.declares(*part) for part in parts) or "{" in self.text(i, self.match[i]):  # a declaration, a block
            return
        for (a, b), (c, d) in zip(parts, parts[1:]):
            yield self.edit(a, d, f"{self.text(c, d)}, {self.text(a, b)}", "swap")
        if len(parts) > 1:
            yield Edit(self.tokens[parts[-2][1]][2], self.tokens[parts[-1][1]][2], "", "drop an item")
        first, name = i, self.match.get(i - 1, i) - 1
        while self.word(first - 1) in ("::", ".", "->") if self.is_name(first) else self.is_name(first - 1) or (
                self.match.get(first - 1, first) < first and self.word(first - 1) != "}"):
            first = self.match.get(first - 1, first - 1)
        alone = self.word(self.match[i] + 1) == ";" and self.word(first - 1) in (";", "{", "}", ")", "else")
        if not alone and not self.is_name(first - 1) and (len(parts) > 1 or not CASTS.fullmatch(self.word(name))):
            for a, b in parts:
                yield self.edit(first, self.match[i], f"({self.text(a, b)})", "drop a call")

    def of_branches(self, i: int) -> Iterator[Edit]:
        colon, depth = i, 1
        while depth and colon + 1 < len(self.tokens):
            colon = max(colon + 1, self.match.get(colon + 1, 0))
            depth += (self.word(colon) == "?") - (self.word(colon) == ":")
        first, last = self.extent(i, -1, 3), self.extent(colon, 1, 1)
        for a, b in ((i + 1, colon - 1), (colon + 1, last)):
            yield self.edit(first, last, self.text(a, b), "branch")

    def of_operands(self, i: int, level: int) -> Iterator[Edit]:
        first, last = self.extent(i, -1, level), self.extent(i, 1, level)
        text = self.word(i)
        if level in LOGICAL:
            for value in ("false", "true"):
                yield self.edit(first, last, value, "condition")
        if first < i < last:
            yield Edit(self.tokens[i - 1][2], self.tokens[last][2], "", "drop an operand")
            yield Edit(self.tokens[first][1], self.tokens[i + 1][1], "", "drop an operand")
        if text in FLIPPED:
            yield self.edit(i, i, FLIPPED[text], "flip")
