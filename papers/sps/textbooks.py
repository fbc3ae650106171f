r"""Build the text of our SPS trials: six OpenStax textbooks as one .jsonl file, a section per line.

    python -m papers.sps.textbooks textbooks.jsonl [--clones=FOLDER]
    python prepare_fineweb.py textbooks.jsonl --tokenizer=byte --val_fraction=0.05 \
        --out_dir=data/built/textbooks

Reads philschatz/NAME-book on GitHub (CC BY 3.0, (c) 2014 OpenStax College) at fixed commits, cloned
into --clones if they are not there. Only running text is kept: no figures, tables, formulas,
exercises, references and glossaries, and no sections under 500 characters.
"""
import argparse
import html
import io
import json
import re
import subprocess
import tarfile
from pathlib import Path

BOOKS = {  # repository philschatz/NAME-book: commit
    'anatomy': 'eadaa6b2992f4e4010f45d58ad4db065e398093e', 'biology': 'cf3dc8c0d87f9dc4d0556464a4ac33b58dd9d726',
    'economics': 'd3f319e7a162fecf1c15c07cd9bf31e6a48e1877', 'psychology': 'aa152d641e2ad5d7f1eccb74a1e9a9b7bf915b9f',
    'sociology': '8f29e07cc2aac36da685b3e805dc3da0e15beb41', 'us-history': '635ed5914eb2ea3768169b88e1119587cb037e82'}
END_MATTER = re.compile(  # headings after which a section has no running text
    r'^#+ *(section summary|chapter review|key concepts and summary|summary|section quiz|review questions?|glossary'
    r'|art connections?|interactive link questions?|self-check questions?|multiple choice|critical thinking questions?'
    r'|free response|short answer|personal application questions?|problems|further research|references|footnotes)\b',
    re.IGNORECASE | re.MULTILINE)
MARKUP = [  # (pattern, replacement), applied in this order
    (r'(?s)<(table|math|figure|iframe|cnx-pi)\b.*?</\1>', ''),
    (r'!\[(?:\\.|[^\]\\])*\]\((?:[^)"]|"(?:\\.|[^"\\])*")*\)', ''),  # figures: ![...](file "caption")
    (r'\s*\((?:[Ss]ee )?\[\\\[link\\\]\]\([^)]*\)\)', ''),  # ([link]): a reference to a figure
    (r'\[\\\[link\\\]\]\([^)]*\)', 'the figure'),
    (r'\{:[^}]*\}', ''),  # attributes
    (r'(?<!\\)\[((?:\\.|[^\]\\])*)\](?:\([^)]*\)|\[[^\]]*\])', r'\1'),  # links keep their text
    (r'(?m)^ *\[\d+\]:.*$', ''),  # the links' targets
    (r'(?m)^ *\|.*$', ''),  # tables of bars
    (r'<[^>]*>', ''),
    (r'(?m)^ *(?:#+|>) *', ''),  # headings, quotations
    (r'(\*\*|__|\*|_)(?=\S)([^*_\n]*?\S)\1', r'\2'),  # emphasis
    (r'\\([^\w\s])', r'\1'),  # escapes
    (r'(?m)^[ \t]+|[ \t]+$', ''), (r'\n{3,}', '\n\n')]


def plain_text(markdown: str) -> str:
    """Return the running text of a section's body."""
    text = END_MATTER.split(markdown, maxsplit=1)[0]
    for pattern, replacement in MARKUP:
        text = re.sub(pattern, replacement, text)
    return html.unescape(text).strip()


def documents(clones: Path):
    """Yield {'id', 'book', 'title', 'text'} of each section, by book and file name."""
    for book, commit in BOOKS.items():
        clone = clones / f'{book}-book'
        if not clone.exists():
            subprocess.run(['git', 'clone', f'https://github.com/philschatz/{book}-book', clone], check=True)
        archive = ['git', '-C', clone, 'archive', commit, 'contents']
        content = io.BytesIO(subprocess.run(archive, check=True, capture_output=True).stdout)
        with tarfile.open(fileobj=content) as files:
            for name in sorted(name for name in files.getnames() if name.endswith('.md')):
                _, head, body = files.extractfile(name).read().decode().split('---\n', 2)
                title = re.search(r'^title: *"?(.*?)"?$', head, re.MULTILINE)
                if len(text := plain_text(body)) >= 500:
                    yield {'id': f'{book}/{Path(name).stem}', 'book': book, 'title': title[1], 'text': text}


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out', type=Path, help='file to write')
    parser.add_argument('--clones', type=Path, default=Path('data/built/textbooks-clones'))
    s = parser.parse_args(argv)
    lines = [json.dumps(document, ensure_ascii=False) + '\n' for document in documents(s.clones)]
    with open(s.out, 'x', encoding='utf-8') as out:  # only now: a failed clone leaves no file
        out.writelines(lines)


if __name__ == '__main__':
    main()
