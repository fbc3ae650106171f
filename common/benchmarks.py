"""Benchmarks from their own files: documents in the fields that lm-eval's tasks read, without a download."""
import json
from pathlib import Path

from common.files import UserError


def local_records(folder, task: str) -> list[dict]:
    """A task's documents from the benchmark's own file in a folder, as lm-eval's task reads them; else a UserError.

    arc_easy, arc_challenge  TASK.jsonl: question {stem, choices} and answerKey, or query, choices and gold
    piqa                     piqa.jsonl or piqa_valid.jsonl: goal, sol1, sol2, and labels in ..._labels.lst or `label`
    social_iqa, hellaswag, winogrande, sciq (or sciq_valid)   TASK.jsonl as published
    lambada_openai, lambada_standard, lambada_first_token     TASK.jsonl: text, or context and continuation
    wikitext, c4, books3, govreport                           TASK.jsonl: page or text, one document a line
    """
    names = [task, f'{task}_valid', *(['lambada_openai'] if task == 'lambada_first_token' else [])]
    path = _first_file(Path(folder) / f'{name}{ending}' for name in names for ending in ('.jsonl', '.json'))
    if path is None:
        raise UserError(f'{folder} has no file for {task}: expected {names[0]}.jsonl')
    with open(path, encoding='utf-8') as file:
        records = [json.loads(line) for line in file if line.strip()]
    labels = _first_file(path.with_name(f'{path.stem}{ending}') for ending in ('_labels.lst', '-labels.lst'))
    if labels:
        of_records = labels.read_text().split()
        records = [record | {'label': int(label)} for record, label in zip(records, of_records, strict=True)]
    try:
        return [as_on_the_hub(record, task) for record in records]
    except (KeyError, TypeError) as error:
        raise UserError(f'{path} has a record without {error}: it is not in the form of {task}')


def _first_file(paths):
    return next((path for path in paths if path.is_file()), None)


def as_on_the_hub(record: dict, task: str) -> dict:
    """One record with the fields of the Hugging Face dataset that lm-eval's task is written for."""
    if task.startswith('arc') and 'query' in record:  # question and answer already put together
        question = record['query'].removeprefix('Question:').removesuffix('Answer:').strip()
        labels = [str(i) for i in range(len(record['choices']))]
        choices = {'text': record['choices'], 'label': labels}
        return {'question': question, 'choices': choices, 'answerKey': str(record['gold'])}
    if task.startswith('arc') and 'stem' in record['question']:
        choices = {key: [choice[key] for choice in record['question']['choices']] for key in ('text', 'label')}
        return {'question': record['question']['stem'], 'choices': choices, 'answerKey': record['answerKey']}
    if task.startswith('lambada') and 'continuation' in record:
        return {'text': f'{record["context"]} {record["continuation"].strip()}'}
    if task in ('wikitext', 'c4') and 'page' not in record:
        return record | {'page': record['text']}
    return record


def task_files(definitions: dict, data_dir, folder) -> list[str]:
    """Tasks of lm-eval over local files: for each a YAML file in `folder`, its own definition but for the documents.

    definitions {task: the path of its YAML file in lm-eval}.
    """
    paths = []
    for task, definition in definitions.items():
        records = Path(folder) / f'{task}.jsonl'
        records.write_text(''.join(json.dumps(record) + '\n' for record in local_records(data_dir, task)))
        files = {split: str(records) for split in ('train', 'validation', 'test')}
        path = Path(folder) / f'{task}.yaml'
        path.write_text(json.dumps({  # JSON is YAML
            'include': str(definition), 'task': task, 'dataset_path': 'json', 'dataset_name': None,
            'dataset_kwargs': {'data_files': files}}))
        paths.append(str(path))
    return paths
