"""papers/sps/textbooks.py: running text from the sources of textbooks."""
import json
import subprocess

import pytest

from papers.sps import textbooks

SECTION = '''---
title: "A *section*"
---

## What it says

The **first** paragraph refers to a [page](http://x.org/a) ([\\[link\\]](#figure)) and to [\\[link\\]](#table)
&amp; more. {: #id}

![A figure](a.jpg "Its caption (long)")

| a table | of bars |

> A quotation. REST

### Review Questions

Not this.
'''


def test_textbooks_are_the_running_text_of_their_sources(tmp_path, monkeypatch):
    contents = tmp_path / 'biology-book/contents'
    contents.mkdir(parents=True)
    (contents / 'm2.md').write_text(SECTION.replace('REST', 'x' * 500))
    (contents / 'm1.md').write_text(SECTION)  # too short
    for command in ('init -q', 'add .', '-c user.name=a -c user.email=a@b.c commit -qm a'):
        subprocess.run(['git', *command.split()], check=True, cwd=contents.parent)
    monkeypatch.setattr(textbooks, 'BOOKS', {'biology': 'unknown'})
    with pytest.raises(subprocess.CalledProcessError):  # and it can be run again
        textbooks.main([str(tmp_path / 'a'), f'--clones={tmp_path}'])
    monkeypatch.setattr(textbooks, 'BOOKS', {'biology': 'HEAD'})
    textbooks.main([str(tmp_path / 'a'), f'--clones={tmp_path}'])
    document, = map(json.loads, (tmp_path / 'a').read_text().splitlines())
    assert document['id'] == 'biology/m2'
    assert document['text'] == ('What it says\n\nThe first paragraph refers to a page and to the figure\n& more.\n\n'
                                f'A quotation. {"x" * 500}')
