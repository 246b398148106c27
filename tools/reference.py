"""Write the parts of the documentation that come out of the program; `make docs` runs it, a test compares."""

import json
from pathlib import Path

from imputer import configs
from imputer.commands import program
from imputer.training import CHOICES

DOCS = Path(__file__).parents[1] / "docs"


def configuration(page: str) -> str:
    """docs/configuration.md with the table of every section as the program has it."""
    for name, section in vars(configs.Config()).items():
        head, title, rest = page.partition(f"\n## {name}\n")
        text, _, rest = rest.partition("\n|")
        _, gap, rest = f"\n{rest}\n".partition("\n\n")
        page = (
            f"{head}{title}{text}\n"
            + "\n".join(section_table(name, type(section)))
            + f"{gap}{rest}".rstrip("\n")
            + "\n"
        )
    return page


def section_table(name: str, kind: type) -> list[str]:
    rows = [
        f"| `{key.name}` | `{json.dumps(key.default)}` | {key.takes.replace(' | ', ', ')} | {key.description} |"
        for key in configs.with_choices(name, configs.keys_of(kind), CHOICES)
    ]
    return ["| key | default | takes | what it does |", "|---|---|---|---|", *rows]


def commands(page: str) -> str:
    """docs/commands.md: the help of every command."""
    for name in program.COMMANDS:
        program.app[name].help = None  # the whole docstring, not the line of the list
    written = program.app.generate_docs(output_format="markdown", recursive=True).replace(
        "```console", "```text"
    )
    parts = written.split("\n## imputer ")
    wanted = [part for part in parts if part.split("\n", 1)[0] in program.COMMANDS]
    return COMMANDS + "".join(f"\n## imputer {part.strip()}\n" for part in wanted)


COMMANDS = """# Commands

What `imputer COMMAND --help` prints. `imputer --install-completion` completes commands, options and files.
Errors are one line on standard error; the exit code is 1 for bad data and 2 for a bad command line.
"""
PAGES = {"configuration.md": configuration, "commands.md": commands}


def main() -> None:
    for name, write in PAGES.items():
        path = DOCS / name
        path.write_text(write(path.read_text(encoding="utf-8") if path.exists() else ""), encoding="utf-8")


if __name__ == "__main__":
    main()
