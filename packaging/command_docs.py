#!/usr/bin/env python3
"""Manual pages and shell completions from `kvasir describe`, the command line as JSON.

    kvasir describe | command_docs.py OUT_DIR

Options come from the program, the prose around them from packaging/man/PAGE.scd. A command without
prose has a page all the same. With scdoc on PATH the pages become roff, else only their scdoc text
is written. Standard library only.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
METAVARS = {"TEXT": "TEXT", "SIZE": "BYTES", "UINT": "N", "INT": "N", "FLOAT": "X"}


# --- the tree ---------------------------------------------------------------------------------

def walk(node, path):
    """Yields (path, node) of a command and all below it."""
    yield path, node
    for child in node["commands"]:
        yield from walk(child, [*path, child["name"]])


def programs(root):
    """The installed programs: kvasir, and its hub command under a name of its own."""
    hub = next((c for c in root["commands"] if c["name"] == "hub"), None)
    return [("kvasir", root)] + ([("kvasir-hub", hub)] if hub else [])


def flags(node):
    return [o for o in node["options"] if not o["positional"]]


def positionals(node):
    return [o for o in node["options"] if o["positional"]]


def metavar(option):
    """What to call an option's value; empty for a flag."""
    if not option["type"]:
        return ""
    return METAVARS.get(option["type"].split(":")[0], "VALUE")


def note(option):
    """What the type says beside its name, for people."""
    parts = []
    bounds = re.search(r"in \[(\S+) - (\S+)\]", option["type"])
    if bounds and f"{bounds[1]} to {bounds[2]}" not in option["help"]:
        parts.append(f"{bounds[1]} to {bounds[2]}")
    choices = re.search(r"\{(.+)\}", option["type"])
    if choices and not all(c in option["help"] for c in choices[1].split(",")):
        parts.append(choices[1].replace(",", ", "))
    if option["default"]:
        parts.append(f"default {option['default']}")
    if option["required"]:
        parts.append("required")
    return "; ".join(parts)


# --- manual pages -----------------------------------------------------------------------------

def scd(text):
    """Text in which scdoc sees no markup: a bracket that opens a line would be a table."""
    return re.sub(r"^([\[|\]])|([\\*_#~<>`])", r"\\\g<0>", text)


def sentence(text):
    """A capital first, unless the first word is no word of English (postgres://…, host:port)."""
    return text if re.match(r"\S*[:/#=]", text) else text[:1].upper() + text[1:]


def synopsis(command, node):
    parts = [f"*{command}*"]
    if len(flags(node)) > 1:
        parts.append("[_options_]")
    for option in flags(node):
        if option["required"]:
            parts.append(f"*{option['names'][-1]}* _{scd(metavar(option))}_")
    for option in positionals(node):
        name = f"_{option['positional']}_" + ("…" if option["many"] else "")
        parts.append(name if option["required"] else f"[{name}]")
    if node["commands"]:
        parts.append("_command_" if node["command_required"] else "[_command_]")
    return " ".join(parts)


def option_list(node, with_help=True):
    lines = []
    for option in node["options"]:
        if "--help" in option["names"] and not with_help:
            continue
        if option["positional"]:
            head = f"_{option['positional']}_"
        else:
            head = ", ".join(f"*{name}*" for name in option["names"])
            if metavar(option):
                head += f" _{metavar(option)}_"
        more = note(option)
        text = option["help"].rstrip(".")
        lines += [head, "\t" + scd(sentence(text) + (f" ({more})" if more else "") + "."), ""]
    if any(option["type"] == "SIZE" for option in node["options"]):
        lines.append("_BYTES_ may end in K, M, G or T, which count in 1024s.")
    return "\n".join(lines).rstrip()


def command_sections(command, node):
    """The commands below a command, each with its options."""
    lines = []
    for path, child in walk(node, []):
        if not path or child["commands"]:
            continue
        lines += [f"## {command} {' '.join(path)}", "", scd(child["help"].rstrip(".") + "."), "",
                  synopsis(f"{command} {' '.join(path)}", child), "", option_list(child, with_help=False), ""]
    return "\n".join(lines).rstrip()


def page(name, command, node, version, others):
    prose_file = HERE / "man" / f"{name}.scd"
    prose = prose_file.read_text() if prose_file.exists() else "# DESCRIPTION\n\n@OPTIONS@\n"
    summary = node["help"].rstrip(".")
    options = "# OPTIONS\n\n" + option_list(node)
    if node["commands"] and name != "kvasir":
        options += "\n\n# COMMANDS\n\n" + command_sections(command, node)
    if "# DESCRIPTION" in prose and prose.startswith("# DESCRIPTION\n\n@OPTIONS@"):
        prose = prose.replace("# DESCRIPTION\n\n", f"# DESCRIPTION\n\n{scd(summary)}.\n\n")
    commands = "\n".join(f"*{command} {c['name']}*\n\t{scd(c['help'].rstrip('.'))}.\n" for c in node["commands"])
    prose = prose.replace("@OPTIONS@", options).replace("@COMMANDS@", commands.rstrip())
    see = ", ".join(f"*{other}*({section})" for other, section in others if other != name)
    return (f'{name}(1) "Kvasir {version}" "Kvasir"\n\n# NAME\n\n{name} - {scd(re.sub(r"^kvasir ", "", summary[0].lower() + summary[1:]))}\n\n'
            f"# SYNOPSIS\n\n{synopsis(command, node)}\n\n{prose.rstrip()}\n\n# SEE ALSO\n\n{see}\n")


def plugin_page(version, others):
    """kvasir-plugin(7): the table of docs/configuration.md, so that both say the same."""
    text = (HERE.parent / "docs" / "configuration.md").read_text()
    lines = []
    for row in re.findall(r"^\| `(KVASIR_\w+)` \|(.*)\|$", text.split("\n## ")[0], re.M):
        values, default, meaning = (c.strip().replace("\0", "|") for c in row[1].replace("\\|", "\0").split("|"))
        clean = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", c).replace("`", "") for c in (values, default, meaning)]
        lines += [f"*{scd(row[0])}*={scd(clean[0])}", f"\t{scd(clean[2].rstrip('.'))}. Default: {scd(clean[1])}.", ""]
    prose = (HERE / "man" / "kvasir-plugin.scd").read_text().replace("@VARIABLES@", "\n".join(lines).rstrip())
    see = ", ".join(f"*{other}*({section})" for other, section in others if other != "kvasir-plugin")
    return f'kvasir-plugin(7) "Kvasir {version}" "Kvasir"\n\n{prose.rstrip()}\n\n# SEE ALSO\n\n{see}\n'


def manual_pages(root):
    """{file name: scdoc text}"""
    commands = [c for c in root["commands"] if c["name"] != "hub"]
    others = [("kvasir", 1), *((f"kvasir-{c['name']}", 1) for c in commands), ("kvasir-hub", 1), ("kvasir-plugin", 7)]
    pages = {f"{n}.1": page(n, n, node, root["version"], others) for n, node in programs(root)}
    for c in commands:
        name = f"kvasir-{c['name']}"
        pages[f"{name}.1"] = page(name, f"kvasir {c['name']}", c, root["version"], others)
    pages["kvasir-plugin.7"] = plugin_page(root["version"], others)
    return pages


# --- completions ------------------------------------------------------------------------------

def bash_completion(program, top):
    """One table by command path; needs neither the bash-completion package nor a running kvasir."""
    f = "_" + program.replace("-", "_")
    lines = [f"# bash completion for {program}, made by packaging/command_docs.py", f"{f}_words() {{",
             '    commands="" options="" valued=""', '    case "$1" in']
    for path, node in walk(top, [program]):
        names = [n for o in flags(node) for n in o["names"]]
        valued = [n for o in flags(node) if o["type"] for n in o["names"]]
        lines.append(f'        "{" ".join(path)}") commands="{" ".join(c["name"] for c in node["commands"])}" '
                     f'options="{" ".join(names)}" valued="{" ".join(valued)}" ;;')
    lines += ["    esac", "}", f"{f}() {{",
              f'    local path={program} cur=${{COMP_WORDS[COMP_CWORD]}} commands options valued i word previous=""',
              f'    {f}_words "$path"',
              "    for ((i = 1; i < COMP_CWORD; ++i)); do",
              "        word=${COMP_WORDS[i]} previous=${COMP_WORDS[i]}",
              f'        case " $commands " in *" $word "*) path="$path $word"; {f}_words "$path" ;; esac',
              "    done",
              "    COMPREPLY=()",
              '    case " $valued " in *" ${previous:-?} "*) COMPREPLY=($(compgen -f -- "$cur")); return ;; esac',
              '    case "$cur" in',
              '        -*) COMPREPLY=($(compgen -W "$options" -- "$cur")) ;;',
              '        *) COMPREPLY=($(compgen -W "$commands" -- "$cur"))',
              '           [ -n "$commands" ] || COMPREPLY=($(compgen -f -- "$cur")) ;;',
              "    esac", "}", f"complete -o filenames -F {f} {program}", ""]
    return "\n".join(lines)


def zsh_text(text):
    return text.replace("'", "'\\''").replace("[", "(").replace("]", ")").replace(":", "\\:")


def zsh_completion(program, top):
    lines = [f"#compdef {program}", "# made by packaging/command_docs.py", ""]
    for path, node in walk(top, [program]):
        name = "_" + "_".join(path)
        arguments = []
        for o in flags(node):
            value = f":{metavar(o)}:_files" if o["type"] else ""
            arguments += [f"'{n}[{zsh_text(o['help'])}]{value}'" for n in o["names"]]
        lines.append(f"{name}() {{")
        if node["commands"]:
            described = " ".join(f"'{c['name']}:{zsh_text(c['help'])}'" for c in node["commands"])
            cases = [f"            {c['name']}) {name}_{c['name']} ;;" for c in node["commands"]]
            lines += ["    local state line", "    local -a commands", f"    commands=({described})",
                      "    _arguments -C " + " ".join(arguments) + " '1:command:->command' '*::argument:->argument'",
                      "    case $state in", "        command) _describe command commands ;;",
                      "        argument) case $line[1] in", *cases, "        esac ;;", "    esac", "}"]
        else:
            rest = f"'*:{positionals(node)[0]['positional']}:_files'" if positionals(node) else ""
            lines += ["    _arguments " + " ".join([*arguments, rest]).rstrip(), "}"]
    return "\n".join([*lines, "", f'_{program} "$@"', ""])


def fish_completion(program, top):
    f = f"__{program.replace('-', '_')}_at"
    paths = " ".join("'" + " ".join(path) + "'" for path, _ in walk(top, [program]))
    lines = [f"# fish completion for {program}, made by packaging/command_docs.py",
             f"function {f}", f"    set -l path {program}",
             "    for token in (commandline -opc)[2..-1]", f'        contains -- "$path $token" {paths}',
             '        and set path "$path $token"', "    end", '    test "$path" = "$argv"', "end"]
    quote = lambda text: "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
    for path, node in walk(top, [program]):
        at = f"complete -c {program} -n '{f} {' '.join(path)}'"
        for c in node["commands"]:
            lines.append(f"{at} -f -a {c['name']} -d {quote(c['help'])}")
        for o in flags(node):
            names = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in o["names"])
            lines.append(f"{at} {names}{' -r' if o['type'] else ''} -d {quote(o['help'])}")
    return "\n".join(lines) + "\n"


def completions(root):
    """{path under the output folder: text}"""
    out = {}
    for program, top in programs(root):
        out |= {f"completion/{program}.bash": bash_completion(program, top), f"completion/_{program}": zsh_completion(program, top),
                f"completion/{program}.fish": fish_completion(program, top)}
    return out


def main():
    out = pathlib.Path(sys.argv[1])
    root = json.load(sys.stdin)
    (out / "man").mkdir(parents=True, exist_ok=True)
    (out / "completion").mkdir(exist_ok=True)
    for name, text in completions(root).items():
        (out / name).write_text(text)
    scdoc = shutil.which("scdoc")
    for name, text in manual_pages(root).items():
        (out / "man" / f"{name}.scd").write_text(text)
        if scdoc:
            roff = subprocess.run([scdoc], input=text, text=True, capture_output=True)
            if roff.returncode != 0:
                sys.exit(f"command_docs.py: scdoc refused {name}: {roff.stderr.strip()}")
            (out / "man" / name).write_text(roff.stdout)


if __name__ == "__main__":
    main()
