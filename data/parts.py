"""Parts of a data folder, prepared on several machines, and the folder that is made of them without copying tokens.

    python prepare_fineweb.py SOURCE --part=1/2 --out_dir=A      on one machine
    python prepare_fineweb.py SOURCE --part=2/2 --out_dir=B      on another
    python prepare_fineweb.py --merge A B --out_dir=DATA

A part has shards as a data folder has, and instead of meta.json a file part.json: what meta.json would say, with
"arguments", the settings and the source that it was made with. It may lack a split: few documents are for validation.
The data folder has hard links to the shards of all parts, numbered anew: the parts may be removed afterwards.
"""
import errno
import os
import re
import secrets
import shutil
from pathlib import Path

from common.files import UserError, read_json, sha256, sync_folder, write_json
from data.shards import ShardWriter, check_meta, check_not_empty, expect, keep_tokenizer, read_checksums


def part_numbers(part: str) -> tuple[int, int]:
    """(which one from 0 on, of how many) that '3/64' says: (2, 64). Raises UserError for what says no such thing."""
    found = re.fullmatch(r'([1-9]\d{0,5})/([1-9]\d{0,5})', part)
    number, n_parts = map(int, found.groups()) if found else (1, 0)
    if number > n_parts:
        raise UserError(f'part is {part!r}: expected NUMBER/PARTS, as 1/64 to 64/64')
    return number - 1, n_parts


def part_folder(folder: Path, part: str) -> Path:
    """Where a part lies by default: beside the data folder, so that their names sort by number."""
    index, n_parts = part_numbers(part)
    return folder.with_name(f'{folder.name}_part_{index + 1:0{len(str(n_parts))}d}_of_{n_parts}')


def finish_part(writer: ShardWriter, arguments: dict) -> None:
    """As `ShardWriter.finish`, of a part: writes what is pending, a copy of the tokenizer's file and part.json."""
    writer.flush()
    write_json(writer.folder / 'part.json', {'arguments': arguments, **writer.meta()})


def read_part(folder: Path) -> dict:
    """What part.json says. Raises UserError if the folder is no whole part."""
    path = folder / 'part.json'
    if not path.is_file():
        is_begun = (folder / 'progress.json').is_file()
        raise UserError(f'{folder} is no part: expected a folder that `prepare_fineweb.py SOURCE --part=NUMBER/PARTS` '
                        f'wrote, with part.json{"; it is not finished, start that again" if is_begun else ""}')
    return read_json(path, 'copy or prepare this part again', check_part)


def check_part(part: dict) -> None:
    """Raises ValueError for a value that no part.json has."""
    expect(isinstance(part.get('arguments'), dict), 'arguments', part.get('arguments'))
    expect(isinstance(part['arguments'].get('part'), str), 'part', part['arguments'].get('part'))
    part_numbers(part['arguments']['part'])
    check_meta(part, is_part=True)
    expect(part['splits'].keys() <= {'train', 'val'}, 'splits', [*part['splits']])


def merge_parts(folders: list[str], out_dir: str, built: Path) -> tuple[Path, dict]:
    """Makes the data folder of all parts of a source: (its path, its splits). All or nothing.

    out_dir '': in `built`, under the name of the first part's folder without _part_1_of_9 or the like. Raises UserError
    if parts are missing, twice or damaged, if their settings differ, if the folder exists, or if it is on another file
    system than the parts.
    """
    if not folders:
        raise UserError('--merge needs the folders of all parts of a source: --merge A B C --out_dir=DATA')
    parts = in_order({Path(folder): read_part(Path(folder)) for folder in folders})
    first, *_ = parts
    folder = Path(out_dir or built / re.sub(r'_part_\d+_of_\d+$', '', first.resolve().name))
    if folder.exists():
        raise UserError(f'{folder} exists: remove it first, or write to another --out_dir')
    temporary = folder.with_name(f'.{folder.name}.{secrets.token_hex(4)}')
    temporary.mkdir(parents=True)
    try:
        splits = {}
        for i, (source, part) in enumerate(parts.items(), 1):
            link_shards(source, part, temporary, splits)
            print(f'part {i} of {len(parts)} is checked: {source}', flush=True)
        check_not_empty(folder, splits)
        meta = {name: value for name, value in parts[first].items() if name != 'arguments'}
        keep_tokenizer(temporary, str(first / meta['tokenizer']))  # nothing where it is a name, as byte
        write_json(temporary / 'meta.json', {**meta, 'splits': splits})
        os.replace(temporary, folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder, splits


def in_order(parts: dict[Path, dict]) -> dict[Path, dict]:
    """{folder: part.json} sorted by number. Raises UserError unless they are all parts of one source, once each."""
    (first, begin), *rest = parts.items()
    for folder, part in rest:
        for name, have, want in differences(part, begin):
            raise UserError(f'{folder} has {name} = {have!r:.100} and {first} has {want!r:.100}: these are no parts of '
                            'one preparation; start prepare_fineweb.py with the same source and settings for each part')
    n_parts = part_numbers(begin['arguments']['part'])[1]
    by_index = {}
    for folder, part in parts.items():
        index, _ = part_numbers(part['arguments']['part'])
        if index in by_index:
            raise UserError(f'{by_index[index]} and {folder} are both part {index + 1} of {n_parts}: give each part '
                            'once')
        by_index[index] = folder
    missing = [str(index + 1) for index in range(n_parts) if index not in by_index]
    if missing:
        raise UserError(f'of {n_parts} parts {len(missing)} are not given: {", ".join(missing[:10])}'
                        f'{" ..." if len(missing) > 10 else ""}; prepare them with --part=NUMBER/{n_parts}, and give '
                        'all of them to --merge')
    return {by_index[index]: parts[by_index[index]] for index in range(n_parts)}


def differences(part: dict, other: dict) -> list[tuple]:
    """[(name, value, the other's value)] of what is to be equal in all parts and is not."""
    values, others = (
        {**record['arguments'], **record, 'part': f'one of {part_numbers(record["arguments"]["part"])[1]}',
         'arguments': None, 'splits': None} for record in (part, other))
    names = [*values, *(name for name in others if name not in values)]
    return [(name, values.get(name), others.get(name)) for name in names if values.get(name) != others.get(name)]


def link_shards(source: Path, part: dict, folder: Path, splits: dict) -> None:
    """Links the shards of a part, checked, into the folder behind those that it has, and adds them to its splits."""
    for split, info in part['splits'].items():
        whole = splits.setdefault(split, {'tokens': 0, 'documents': 0, 'bytes': 0, 'shards': []})
        for key in ('tokens', 'documents', 'bytes'):
            whole[key] += info[key]
        for record in info['shards']:
            path = source / record['file']
            if not path.is_file() or sha256(path) != record['sha256']:
                raise UserError(f'{path} is missing, or does not match its checksum in part.json: copy or prepare '
                                f'part {part["arguments"]["part"]} again')
            checksums = path.with_suffix('.crc32')
            if read_checksums(checksums, path.stat().st_size) is None:
                raise UserError(f'{checksums} is missing: copy or prepare part {part["arguments"]["part"]} again')
            name = f'{split}_{len(whole["shards"]):05d}.bin'
            link(path, folder / name)
            link(checksums, (folder / name).with_suffix('.crc32'))
            whole['shards'].append({**record, 'file': name})


def link(path: Path, target: Path) -> None:
    """A second name of a file, a hard link. Raises UserError where the file system has none between the two folders."""
    try:
        os.link(path, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK):
            raise
        raise UserError(f'{path} cannot be linked into {target.parent.parent} ({error.strerror}): put all parts and '
                        '--out_dir on one file system that has hard links, so that no token is copied')
