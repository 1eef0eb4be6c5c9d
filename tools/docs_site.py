"""Builds the docs site from the repository's pages: `make docs`, into build/site.

What always holds: pages have the same paths in the site as in the repository, so their links work in both; of other
files only those are included that a page links to; the build is strict, as mkdocs.yml says. What it doesn't do:
download anything.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["build", "lay_out", "main"]

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("*.md", "docs/*.md", "examples/*.md")
_LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)")


def lay_out(root: Path, target: Path) -> None:
    """Copy the pages, and the files that they link to."""
    shutil.rmtree(target, ignore_errors=True)
    pages = [page for pattern in PAGES for page in sorted(root.glob(pattern))]
    linked = [page.parent / link for page in pages for link in _LINK.findall(page.read_text())]
    for source in [*pages, *linked, *(root / "docs/site").glob("*")]:
        name = Path(os.path.relpath(source, root))  # without resolving what may be a link
        if source.is_file() and ".." not in name.parts:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target / name)


def build(root: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a tree into its build/site."""
    lay_out(root, root / "build/docs-source")
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--config-file", str(root / "mkdocs.yml")],
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def main() -> int:
    """Build the site, and print its path."""
    done = build(ROOT)
    if done.returncode:
        sys.stderr.write(done.stdout + done.stderr)
    else:
        print("The site is in build/site: open build/site/index.html.")
    return done.returncode


if __name__ == "__main__":
    raise SystemExit(main())
