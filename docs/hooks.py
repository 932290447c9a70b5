"""Build hook of the documentation: the command reference is written from the command line itself."""

from __future__ import annotations

from typing import Any

PAGE = "commands.md"


def on_files(files: Any, config: Any) -> Any:
    """Add the generated page of all commands."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=commands()))
    return files


def commands() -> str:
    """Markdown of every command: usage, what it does, arguments and options with their defaults."""
    import typer

    from tseeds_cli.main import app

    root = typer.main.get_command(app)
    lines = ["# Commands", "", "Generated from the command line; `tseeds COMMAND --help` says the same.", ""]
    for path, command in _walk(root, "tseeds"):
        context = typer.Context(command, info_name=path)
        usage = " ".join(command.collect_usage_pieces(context))
        lines += [f"## {path}", "", (command.help or "").strip(), "", f"    {path} {usage}", ""]
        parameters = [p for p in command.params if p.name != "help" and getattr(p, "help", None)]
        if parameters:
            lines += ["| | |", "|---|---|"]
        for parameter in parameters:
            name = str(parameter.name)
            shown = name.upper() if parameter.param_type_name == "argument" else ", ".join(parameter.opts)
            text = " ".join(str(parameter.help).split()).replace("|", "\\|")
            default = parameter.default
            told = isinstance(default, (str, int, float)) and not isinstance(default, bool) and default != ""
            lines.append(f"| `{shown}` | {text}{f' Default: `{default}`.' if told else ''} |")
        lines.append("")
    return "\n".join(lines)


def _walk(command: Any, path: str) -> Any:
    if not hasattr(command, "list_commands"):
        yield path, command
        return
    for name in command.list_commands(None):
        yield from _walk(command.get_command(None, name), f"{path} {name}")
