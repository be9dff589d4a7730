"""Hooks of the documentation site (mkdocs.yml): reference pages made from the code, and links that leave the site."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import click
import typer
from mkdocs.structure.files import File, Files

LINK = re.compile(r"(!?)\[([^\]]*)\]\((\.\./[^)\s]+)\)")


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages that are made from the code."""
    pages = {
        "reference/python.md": python_page,
        "reference/commands.md": command_page,
        "reference/http.md": http_page,
        "project/changelog.md": partial(root_page, "CHANGELOG.md"),
        "project/contributing.md": partial(root_page, "CONTRIBUTING.md"),
    }
    for path, write in pages.items():
        files.append(File.generated(config, path, content=write()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Files of the repository are not on the site: their links become names."""
    depth = page.file.src_uri.count("/")

    def name(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        leaves = target.count("../") > depth
        return f"{text} (`{target.replace('../', '')}`)" if leaves and not image else match.group(0)

    return LINK.sub(name, markdown)


def root_page(name: str) -> str:
    """A page of the repository's root; its links to docs/ stay on the site."""
    text = (Path(__file__).parents[1] / name).read_text(encoding="utf-8")
    return re.sub(r"\]\((?!https?:|#)(docs/)?", lambda match: "](../" if match.group(1) else "](../../", text)


def python_page() -> str:
    """Every public name, from its docstring."""
    import mergestream as ms
    from mergestream.bench.python_calls import bench

    lines = ["# Python", "", "All public names; import them with `import mergestream as ms`.", ""]
    for public in sorted(ms.__all__):
        value = bench if public == "bench" else getattr(ms, public)  # a package of this name is in the way
        module = getattr(value, "__module__", None)
        if isinstance(value, str):
            continue
        target = f"{module}.{value.__qualname__}" if module and hasattr(value, "__qualname__") else value.__name__
        lines += [f"::: {target}", ""]
    return "\n".join(lines)


def command_page() -> str:
    """Every command with its arguments and options."""
    from mergestream.cli.app import app

    root = typer.main.get_command(app)
    lines = ["# Command line", "", "Exit codes: 0 done, 1 failed, 2 wrong usage.", ""]
    for names, command in commands(root, ("mergestream",)):
        lines += [f"## {' '.join(names)}", "", (command.help or "").replace("\b", "").strip(), ""]
        lines += parameters(command, names)
    return "\n".join(lines)


def commands(command: Any, names: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    """The commands without their groups."""
    if not hasattr(command, "commands"):
        return [(names, command)]
    return [each for name, child in command.commands.items() for each in commands(child, (*names, name))]


def parameters(command: Any, names: tuple[str, ...]) -> list[str]:
    context = click.Context(command, info_name=" ".join(names))
    rows = []
    for parameter in command.params:
        record = parameter.get_help_record(context)
        label, text = record if record else (parameter.human_readable_name, getattr(parameter, "help", "") or "")
        if parameter.name != "help":
            rows.append(
                "| `{}` | {} |".format(*(part.replace("|", "\\|").replace("\n", " ") for part in (label, text)))
            )
    return ["| argument or option | meaning |", "|---|---|", *rows, ""] if rows else []


def http_page() -> str:
    """Every route, from the service's own OpenAPI document, and every code of a problem."""
    from mergestream.serving.http.application import create_app
    from mergestream.serving.http.problems import ALWAYS, PROBLEMS
    from mergestream.serving.service import Service

    def unopened(_: Any) -> Any:
        raise RuntimeError("the documentation opens no engine")

    document = create_app(Service(unopened)).openapi()
    lines = ["# HTTP", "", document["info"].get("description", ""), ""]
    for path, methods in document["paths"].items():
        for verb, about in methods.items():
            lines += route(verb.upper(), path, about, document["components"]["schemas"])
    lines += ["## Problems", "", "Any URL under `/v1` may answer the codes marked with a star.", ""]
    lines += ["| code | status | meaning |", "|---|---:|---|"]
    lines += [
        f"| `{code}`{'*' * (code in ALWAYS)} | {each.status} | {each.meaning} |" for code, each in PROBLEMS.items()
    ]
    return "\n".join(lines)


def route(verb: str, path: str, about: dict[str, Any], schemas: dict[str, Any]) -> list[str]:
    """One URL: what it does, an example, its parameters, its answer."""
    lines = [f"## {verb} {path}", "", about.get("description") or about.get("summary", ""), ""]
    lines += ["```", example(verb, path, about.get("requestBody", {}).get("content", {})), "```", ""]
    given = about.get("parameters", [])
    if given:
        lines += ["| parameter | in | meaning |", "|---|---|---|"]
        lines += [f"| `{each['name']}` | {each['in']} | {each.get('description', '')} |" for each in given] + [""]
    for status, answer in about["responses"].items():
        schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
        if status == "200" and "$ref" in schema:
            lines += fields(schemas[schema["$ref"].rpartition("/")[2]])
        elif status.startswith("2"):
            lines += [f"{status}: {answer.get('description', '')}", ""]
    return lines


def example(verb: str, path: str, content: dict[str, Any]) -> str:
    """A command that calls the URL."""
    parts = ["curl", *([] if verb == "GET" else ["-X", verb]), "-H 'Authorization: Bearer TOKEN'"]
    if "multipart/form-data" in content:
        parts.append("-F images=@one.png")
    elif "application/json" in content:
        schema = content["application/json"].get("schema", {})
        values = [f'"{name}": …' for name in schema.get("properties", {})]
        parts.append("-H 'Content-Type: application/json' -d '{" + ", ".join(values) + "}'")
    elif content:
        parts.append(f"-H 'Content-Type: {next(iter(content))}; boundary=X' --data-binary @objects")
    address = path.replace("{stream}", "scanner-1").replace("{expert}", "lyon")
    return " ".join([*parts, f"https://merge.example{address}"])


def fields(schema: dict[str, Any]) -> list[str]:
    """The fields of an answer."""
    rows = [
        f"| `{name}` | {' '.join(about.get('description', '').split())} |"
        for name, about in schema.get("properties", {}).items()
    ]
    return ["| field of the answer | meaning |", "|---|---|", *rows, ""]
