"""Benchmarks from their own files: documents in the fields that lm-eval's tasks read, without a download."""
import json
from pathlib import Path

from common.files import UserError

FIELDS = {  # that lm-eval's tasks read, with their types
    **dict.fromkeys(['arc_easy', 'arc_challenge'], {'question': str, 'choices': dict, 'answerKey': str}),
    'piqa': {'goal': str, 'sol1': str, 'sol2': str, 'label': int},
    'social_iqa': {'context': str, 'question': str, 'answerA': str, 'answerB': str, 'answerC': str,
                   'label': (int, str)},
    'hellaswag': {'activity_label': str, 'ctx_a': str, 'ctx_b': str, 'endings': list, 'label': (int, str)},
    'winogrande': {'sentence': str, 'option1': str, 'option2': str, 'answer': str},
    'sciq': {'question': str, 'distractor1': str, 'distractor2': str, 'distractor3': str, 'correct_answer': str,
             'support': str},
    **dict.fromkeys(['lambada_openai', 'lambada_standard', 'lambada_first_token'], {'text': str}),
    **dict.fromkeys(['books3', 'govreport'], {'text': str}),
    **dict.fromkeys(['wikitext', 'c4'], {'page': str})}
SOUND = {  # whether the answer of a record is one of its choices, its sentence has a gap, its text a word
    **dict.fromkeys(['arc_easy', 'arc_challenge'], lambda r: (
        are_texts(r['choices']['text']) and r['answerKey'] in r['choices']['label'])),
    'piqa': lambda r: r['label'] in (0, 1),
    'social_iqa': lambda r: int(r['label']) in (1, 2, 3),
    'hellaswag': lambda r: are_texts(r['endings']) and 0 <= int(r['label']) < len(r['endings']),
    'winogrande': lambda r: r['answer'] in ('1', '2') and '_' in r['sentence'],
    **dict.fromkeys(['lambada_openai', 'lambada_standard', 'lambada_first_token'], lambda r: ' ' in r['text'].strip()),
    **dict.fromkeys(['books3', 'govreport'], lambda r: r['text'].strip()),
    **dict.fromkeys(['wikitext', 'c4'], lambda r: r['page'].strip())}


def local_records(folder, task: str) -> list[dict]:
    """A task's documents from the benchmark's own file in a folder, as lm-eval's task reads them; else a UserError.

    NAME.jsonl or .json stands for NAME_val, _valid, _validation, _dev and _test too, and NAME_labels.lst beside it may
    have the labels, one a line.

    arc_easy, arc_challenge  TASK.jsonl: question {stem, choices} and answerKey, or query, choices and gold
    piqa, social_iqa, hellaswag, winogrande, sciq             TASK.jsonl as published
    lambada_openai, lambada_standard, lambada_first_token     TASK.jsonl: text, or context and continuation
    wikitext, c4, books3, govreport                           TASK.jsonl: page or text, one document a line
    any other task of lm-eval                                 TASK.jsonl: the fields of its dataset on the hub
    """
    names = [task, *(['lambada_openai'] if task == 'lambada_first_token' else [])]
    path = _first_file(Path(folder) / f'{name}{part}{ending}' for name in names
                       for part in ('', '_valid', '_val', '_validation', '_dev', '_test')
                       for ending in ('.jsonl', '.json'))
    if path is None:
        raise UserError(f'{folder} has no file for {task}: expected {names[0]}.jsonl')
    labels = _first_file(path.with_name(f'{path.stem}{ending}') for ending in ('_labels.lst', '-labels.lst'))
    records = []
    try:
        lines = [line for line in path.read_bytes().split(b'\n') if line.strip()]
        of_lines = [int(label) for label in labels.read_text().split()] if labels else [None] * len(lines)
        if len(of_lines) != len(lines):
            raise ValueError(f'{labels.name} has {len(of_lines)} labels for {len(lines)} records')
        for line, label in zip(lines, of_lines):
            record = json.loads(line)
            record = as_on_the_hub(record if label is None else record | {'label': label}, task)
            check_record(record, task)
            records.append(record)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f'{path}, record {len(records) + 1}, is not in the form of {task} ({type(error).__name__}: '
                        f'{error})')
    if not records:
        raise UserError(f'{path} is empty')
    return records


def are_texts(values) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def check_record(record: dict, task: str) -> None:
    """Raises ValueError unless the record has the fields of a task that we know, and an answer that there is."""
    for name, kind in FIELDS.get(task, {}).items():
        if not isinstance(record.get(name), kind):
            raise ValueError(f'its {name!r} is {record.get(name)!r}')
    if task in SOUND and not SOUND[task](record):
        raise ValueError('its answer is none of its choices, or a text is missing')


def _first_file(paths):
    return next((path for path in paths if path.is_file()), None)


def as_on_the_hub(record: dict, task: str) -> dict:
    """One record with the fields of the Hugging Face dataset that lm-eval's task is written for."""
    if task.startswith('arc') and 'query' in record:  # question and answer already put together
        question = record['query'].removeprefix('Question:').removesuffix('Answer:').strip()
        labels = [str(i) for i in range(len(record['choices']))]
        choices = {'text': record['choices'], 'label': labels}
        return {'question': question, 'choices': choices, 'answerKey': str(record['gold'])}
    if task.startswith('arc') and isinstance(record['question'], dict):
        choices = {key: [choice[key] for choice in record['question']['choices']] for key in ('text', 'label')}
        return {'question': record['question']['stem'], 'choices': choices, 'answerKey': record['answerKey']}
    if task.startswith('lambada') and 'continuation' in record:
        return {'text': f'{record["context"]} {record["continuation"].strip()}'}
    if task in ('wikitext', 'c4'):  # lm-eval reads the one or the other, by its version
        text = record['page'] if 'page' in record else record['text']
        return record | {'page': text, 'text': text}
    if task == 'winogrande':
        return record | {'answer': str(record['label'] if 'label' in record else record['answer'])}
    return record


def task_files(entries: dict, data_dir, folder) -> list[str]:
    """Tasks of lm-eval over local files: for each a YAML file in `folder`, its own definition but for the documents.

    entries {task: its entry in the index of lm-eval's TaskManager}.
    """
    paths = []
    for task, entry in entries.items():
        if entry.kind.name != 'TASK':
            raise UserError(f'{task} is several tasks of lm-eval: with --data_dir name each task, as it has a file')
        records = Path(folder) / f'{task}.jsonl'
        records.write_text(''.join(json.dumps(record) + '\n' for record in local_records(data_dir, task)))
        splits = [split for key, split in entry.cfg.items() if key.endswith('_split') and split]
        path = Path(folder) / f'{task}.yaml'
        path.write_text(json.dumps({  # JSON is YAML
            'include': str(entry.yaml_path), 'task': task, 'dataset_path': 'json', 'dataset_name': None,
            'dataset_kwargs': {'data_files': {split: str(records) for split in splits},
                               'cache_dir': str(folder)}}))  # else each call leaves a copy in the user's cache
        paths.append(str(path))
    return paths
