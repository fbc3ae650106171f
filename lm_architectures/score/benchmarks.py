"""Local benchmark files, as published, for lm-eval's tasks. Nothing is downloaded."""
import json
from pathlib import Path

from lm_architectures.files import UserError


def local_records(folder, task: str, parts=('', '_valid', '_val', '_dev', '_test')) -> list[dict]:
    """Return a task's documents from a folder, with the fields that lm-eval's task expects.

    Reads TASK.jsonl, or TASK_valid.jsonl, _val, _dev or _test, as `parts` says. Labels may be in
    NAME_labels.lst next to NAME.jsonl, one per line. Fields:

    arc_easy, arc_challenge: question {stem, choices} and answerKey, or query, choices, gold
    piqa, social_iqa, hellaswag, winogrande, sciq: as published
    lambada_openai, lambada_standard: text, or context and continuation
    wikitext, c4: page or text. books3, govreport: text. One document per line
    other lm-eval tasks: the fields of the dataset on the hub
    """
    paths = [Path(folder) / f'{task}{part}.jsonl' for part in parts]
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        raise UserError(f'{folder} has no file for {task}: expected {paths[0].name}')
    records, labels = [], path.with_name(f'{path.stem}_labels.lst')
    try:
        lines = [line for line in path.read_text(encoding='utf-8-sig').split('\n') if line.strip()]
        added = [{}] * len(lines)
        if labels.is_file():
            added = [{'label': int(label)} for label in labels.read_text().split()]
        for line, label in zip(lines, added):
            records.append(to_hub_fields(json.loads(line) | label, task))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f'{path}, record {len(records) + 1}, does not have the fields of {task} '
                        f'({type(error).__name__}: {error})')
    if len(lines) != len(added):
        raise UserError(f'{labels} has {len(added)} labels, but {path.name} has {len(lines)} records: expected as many')
    if not records:
        raise UserError(f'{path} is empty: expected one JSON record per line')
    return records


def to_hub_fields(record: dict, task: str) -> dict:
    """Convert a record to the fields of the Hugging Face dataset that lm-eval's task reads."""
    if task.startswith('arc') and 'query' in record:  # one string, "Question: ... Answer:"
        question = record['query'].removeprefix('Question:').removesuffix('Answer:').strip()
        labels = [str(i) for i in range(len(record['choices']))]
        choices = {'text': record['choices'], 'label': labels}
        return {'question': question, 'choices': choices, 'answerKey': str(record['gold'])}
    if task.startswith('arc') and isinstance(record['question'], dict):
        choices = {key: [choice[key] for choice in record['question']['choices']] for key in ('text', 'label')}
        return {'question': record['question']['stem'], 'choices': choices, 'answerKey': record['answerKey']}
    if task.startswith('lambada'):
        if 'continuation' in record:
            return {'text': f'{record["context"]} {record["continuation"].strip()}'}
        return {'text': str(record['text'])}
    if task in ('wikitext', 'c4'):  # lm-eval versions read one or the other
        text = record['page'] if 'page' in record else record['text']
        return record | {'page': text, 'text': text}
    if task == 'winogrande':
        return record | {'answer': str(record['label'] if 'label' in record else record['answer'])}
    return record


def task_files(entries: dict, data_dir, folder: Path, has_examples: bool = False) -> list[str]:
    """Write lm-eval tasks that read local files: one YAML file each, which includes lm-eval's own.

    entries: {task: its entry in the index of lm-eval's TaskManager}. has_examples: few-shot
    examples come from TASK_train.jsonl. Returns the paths.
    """
    def write_records(path, records):
        path.write_text(''.join(json.dumps(record) + '\n' for record in records))
        return str(path)
    paths = []
    for task, entry in entries.items():
        if entry.kind.name != 'TASK':
            raise UserError(f'{task} is a group of lm-eval tasks: with --data_dir, name the tasks one by one')
        file, examples = write_records(folder / f'{task}.jsonl', local_records(data_dir, task)), {}
        files = {split: file for key, split in entry.cfg.items() if key.endswith('_split') and split}
        if has_examples:
            files['examples'] = write_records(folder / f'{task}_train.jsonl', local_records(data_dir, task, ['_train']))
            examples = {'fewshot_split': 'examples'}
        path = folder / f'{task}.yaml'
        path.write_text(json.dumps({  # JSON is YAML
            'include': str(entry.yaml_path), 'task': task, 'dataset_path': 'json', 'dataset_name': None, **examples,
            'dataset_kwargs': {'data_files': files, 'cache_dir': str(folder)}}))  # not the user's cache
        paths.append(str(path))
    return paths
