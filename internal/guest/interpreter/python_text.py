# What a text is: Python or a command. It is the second half of python.py, with
# which it is sent to the interpreter; texts.txt is its specification.

import keyword
import re

# Words that a shell runs itself (bash(1), POSIX.1-2017 XCU 2.14).
SHELL_BUILTINS = frozenset(
    ": . [ alias bg bind builtin caller cd command compgen complete declare dirs disown echo enable eval exec exit "
    "export false fc fg getopts hash help history jobs kill let local logout mapfile popd printf pushd pwd read "
    "readarray readonly return set shift shopt source suspend test times trap true type typeset ulimit umask unalias "
    "unset wait [[ ((".split())
# Compound commands, and the word that Python never has in its place.
SHELL_COMPOUNDS = {"if": "then", "for": "do", "while": "do", "until": "do", "select": "do", "case": "esac", "function": "", "coproc": ""}
# What may come before a command.
SHELL_PREFIXES = frozenset(("!", "{", "time"))

BLANK = re.compile(r"(?:[ \t\r\n]|\\\n|#[^\n]*(?=\n|\Z))+")
WORD = re.compile(r"""(?:[^\s'"\\`$;|&<>()]|\\.|'[^']*'|"(?:[^"\\]|\\.)*"|[$`])+""", re.S)
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(?:\[[^]]*\])?\+?=")
REDIRECTION = re.compile(r"\d*(?:>>|>\||>&|<<<|<>|<&|<|>)[ \t]*")
PYTHON_OPERATOR = re.compile(r"[ \t]+(?:[-+*/%@&|^=!:]|//|\*\*|<<|>>)?=(?=\s)")  # assignments, comparisons


def classify(source, names):
    """Python if it parses and all that it reads is bound; else a command, if
    its first word is one; else Python."""
    try:
        tree = compile(source, "<text>", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if all_bound(tree, source, names):
            return PYTHON
        parses = True
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        parses = False
    return SHELL if is_command(source, parses) else PYTHON


def all_bound(tree, source, names):
    """Whether every global name that the text reads has a value, or gets one
    somewhere in the text."""
    if any(isinstance(n, ast.ImportFrom) and n.names[0].name == "*" for n in ast.walk(tree)):
        return True
    tables = [symtable.symtable(source, "<text>", "exec")]
    for table in tables:  # grows as it goes
        tables.extend(table.get_children())
    bound, read = set(), set()
    for table in tables:
        top = table.get_type() == "module"
        for symbol in table.get_symbols():
            name = symbol.get_name()
            gets = symbol.is_assigned() or symbol.is_imported()
            if gets and (top or symbol.is_declared_global()):
                bound.add(name)
            elif symbol.is_referenced() and (top or symbol.is_global()):
                read.add(name)
    return all(name in bound or name in names or hasattr(builtins, name) for name in read)


def is_command(source, parses):
    """Whether a shell would find the first word. parses: it is Python, too."""
    at, assigned = 0, False
    while True:
        blank = BLANK.match(source, at)
        at = blank.end() if blank else at
        redirection = REDIRECTION.match(source, at)
        if redirection:
            target = WORD.match(source, redirection.end())
            if not target:
                return False
            at, assigned = target.end(), True
            continue
        if source.startswith("((", at):
            return not parses
        if source.startswith("(", at):
            at += 1
            continue
        match = WORD.match(source, at)
        if not match:
            return assigned and not parses
        word, at = match.group(), match.end()
        if word in SHELL_PREFIXES:
            if at == len(source):
                return not parses and word == "time"
            continue
        assignment = ASSIGNMENT.match(word)
        if assignment and (assignment.end() < len(word) or not source.startswith("(", at)):
            at = skip_substitution(source, at)
            assigned = True
            continue
        break
    if word in SHELL_COMPOUNDS:
        end = SHELL_COMPOUNDS[word]
        return not parses and re.search(r"\b%s\b" % end, source[at:]) is not None
    if keyword.iskeyword(word) or PYTHON_OPERATOR.match(source, at):
        return False
    if source.startswith("(", at):  # a call, or the definition of a function
        return not parses and re.match(r"\(\s*\)\s*[{(]", source[at:]) is not None
    return names_command(word, parses)


def skip_substitution(source, at):
    """The end of the rest of a word: WORD stops at the parenthesis of $(…)."""
    depth = 0
    while at < len(source) and (depth or not source[at].isspace()):
        depth += {"(": 1, ")": -1}.get(source[at], 0)
        at += 1
    return at


def names_command(word, parses):
    if "$" in word or "`" in word:
        return not parses
    word = re.sub(r"\\(.)", r"\1", re.sub(r"""['"]""", "", word), flags=re.S)
    if word in SHELL_BUILTINS:
        return True
    if word.startswith(("/", "./", "../", "~")):
        return not parses or executable(os.path.expanduser(word))
    return which(word) is not None
