"""Hugging Face models import with equal logits, losses and gradients, and export bitwise."""
import json
import re
from contextlib import suppress

import pytest
import torch
from conftest import NO_SIZES, assert_sentence, run, succeeded
from safetensors.torch import load_file, save_file

from lm_architectures.data.text.tokenizers import load_tokenizer
from lm_architectures.data.text.train_tokenizer import train_tokenizer
from lm_architectures.decode.generation import generate
from lm_architectures.files import UserError
from lm_architectures.hf import export, families, import_model
from lm_architectures.run import folders, records

SMALL = dict(vocab_size=257, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6,
             num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=256, pad_token_id=None)
LLAMA3 = {'rope_type': 'llama3', 'rope_theta': 5e5, 'factor': 8.123456789, 'low_freq_factor': 1.0,
          'high_freq_factor': 4.0, 'original_max_position_embeddings': 32}
FOLDERS = {  # name: (family, settings)
    'Llama 2': ('llama', dict(num_key_value_heads=6)),
    'Llama with an ignored window': ('llama', dict(sliding_window=5)),
    'Llama 3': ('llama', dict(rope_parameters=LLAMA3, tie_word_embeddings=True)),
    'linear positions': ('llama', dict(rope_parameters={'rope_type': 'linear', 'rope_theta': 1e4, 'factor': 2.5})),
    'TinyLlama': ('llama', dict(rms_norm_eps=1e-5)),
    'SmolLM2': ('llama', dict(num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True)),
    'more rows than ids': ('llama', dict(vocab_size=300)),
    'Mistral': ('mistral', dict(sliding_window=7, head_dim=12)),
    'Mistral without a window': ('mistral', dict(sliding_window=None)),
    'Qwen2': ('qwen2', dict(tie_word_embeddings=True)),
    'Qwen2 with a window': ('qwen2', dict(use_sliding_window=True, sliding_window=5, max_window_layers=0)),
    'Qwen3': ('qwen3', dict(head_dim=16)),
}


def make_folder(folder, name, dtype=torch.float32):
    """Save a random model of a family and return it in eval mode."""
    from transformers import AutoConfig, AutoModelForCausalLM
    family, values = FOLDERS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SMALL, **values}), dtype=dtype).eval()
    for p in model.parameters():  # large enough that norms and biases matter
        torch.nn.init.normal_(p, std=0.2 if p.dim() > 1 else 0.5)
    model.save_pretrained(folder, max_shard_size='50KB' if name == 'Qwen3' else '1GB')  # one file or several
    return model


def all_tensors(folder):
    return {name: tensor for file in folder.glob('*.safetensors') for name, tensor in load_file(file).items()}


def change_config(folder, **values):
    path = folder / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def import_run(folder, out):
    import_model.import_folder(folder, out, 'byte')
    return folders.load_run(out)


@pytest.mark.parametrize('name', FOLDERS)
def test_logits_loss_gradients_and_cached_decoding_equal_hugging_face(name, tmp_path):
    """In float64, except Hugging Face's norms and angles, which are fp32."""
    theirs = make_folder(tmp_path / 'folder', name).double()
    model, record = import_run(tmp_path / 'folder', tmp_path / 'run')
    model = model.double()
    idx = torch.randint(0, 257, (2, 40))
    want = theirs(input_ids=idx, labels=idx)
    want_logits = want.logits[..., :257].detach()
    assert (model.logits(idx)[..., :257] - want_logits).abs().max() < 2e-6
    loss = model(idx, torch.cat([idx[:, 1:], torch.full((2, 1), -1)], 1))['loss']
    assert abs(loss - want.loss) < 2e-6
    loss.backward()
    want.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    gradients = families.family_tensors(model.config, gradients, record['data']['n_rows'])
    for name, p in theirs.named_parameters():
        assert (gradients[name] - p.grad).abs().max() < 2e-6 * (1 + p.grad.abs().max()), name
    cache = model.new_cache(2, 40, max_call=4)
    logits = [model.extend(idx[:, a:b], cache, all_positions=True) for a, b in ((0, 20), (20, 23), (23, 40))]
    assert (torch.cat(logits, 1)[..., :257] - want_logits).abs().max() < 2e-6


@pytest.mark.parametrize('name', FOLDERS)
def test_a_round_trip_is_bitwise_and_returns_the_family(name, tmp_path):
    """Mistral without a window comes back as a Llama, which it is."""
    from transformers import AutoModelForCausalLM
    dtype = torch.float32 if name == 'Llama 3' else torch.bfloat16
    theirs = make_folder(tmp_path / 'folder', name, dtype)
    import_run(tmp_path / 'folder', tmp_path / 'run')
    export.export_run(tmp_path / 'run', tmp_path / 'back')
    before, after = (all_tensors(tmp_path / folder) for folder in ('folder', 'back'))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / 'back', dtype=dtype)
    assert type(again) is type(theirs) or name == 'Mistral without a window'
    idx = torch.randint(0, 257, (2, 40))
    idx[:, ::5] = 0  # must not be taken for padding, which Hugging Face masks
    logits = theirs(input_ids=idx).logits
    assert torch.equal(again(input_ids=idx).logits, logits) and again.config.eos_token_id == 256
    assert again.generate(idx, max_new_tokens=1, do_sample=False)[:, -1].equal(logits[:, -1].argmax(-1))


NAME, BIAS = 'model.layers.1.self_attn.k_proj.weight', 'model.layers.1.self_attn.o_proj.bias'
MLP_BIASES = {f'model.layers.{i}.mlp.{name}_proj.bias': torch.zeros(size)
              for i in (0, 1) for name, size in (('gate', 80), ('up', 80), ('down', 48))}


@pytest.mark.parametrize('weights, config, part', [
    ({NAME: None}, {}, f"missing keys ['{NAME}']"), ({BIAS: torch.zeros(48)}, {}, f"unexpected keys ['{BIAS}']"),
    (MLP_BIASES, {'mlp_bias': True}, 'has model.layers.0.mlp.down_proj.bias, which model_standard lacks'),
    ({NAME: torch.full((16, 48), torch.nan)}, {}, 'has NaN or infinity in blocks.1.qkv.weight'),
    ({NAME: torch.zeros(48, 48)}, {}, 'mismatched keys'), ({}, {'num_hidden_layers': 3}, 'missing keys'),
    ({}, {'model_type': 'gpt2'}, "has model_type = 'gpt2': expected one of llama, mistral, qwen2, qwen3"),
    ({}, {'model_type': ['llama']}, "has model_type = ['llama']: expected one of"),
    ({}, {'rope_parameters': {'rope_type': 'yarn', 'rope_theta': 1e4, 'factor': 2.0}}, "rope_type 'yarn'"),
    ({}, {'hidden_act': 'gelu'}, "hidden_act = 'gelu'"), ({}, {'vocab_size': 200}, 'has a vocabulary of 200 rows'),
    ({}, {'model_type': 'qwen2', 'layer_types': ['full_attention', 'sliding_attention'], 'use_sliding_window': True,
          'sliding_window': 5, 'max_window_layers': 1}, 'a sliding window in some layers only'),
    ({}, {'hidden_size': 'x'}, 'could not be read'), ({}, {'max_position_embeddings': 0}, 'block_size is 0'),
    ({}, {'eos_token_id': -1}, 'ends of text are [-1, 256]: expected ids from 0 to 256')])
def test_unsupported_folders_give_a_clear_error(weights, config, part, tmp_path):
    make_folder(tmp_path / 'folder', 'Llama 3')
    path = tmp_path / 'folder/model.safetensors'
    tensors = load_file(path) | weights
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    change_config(tmp_path / 'folder', **config)
    with pytest.raises(UserError, match=re.escape(part)):
        import_run(tmp_path / 'folder', tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_code_of_a_hugging_face_folder_never_runs(tmp_path, monkeypatch):
    make_folder(tmp_path / 'folder', 'Llama 2')
    (tmp_path / 'folder/evil.py').write_text(f'open({str(tmp_path / "ran")!r}, "w")\n')
    change_config(tmp_path / 'folder', auto_map={'AutoConfig': 'evil.C', 'AutoTokenizer': 'evil.T'})
    monkeypatch.setattr('builtins.input', lambda *args: 'y')
    with suppress(UserError):
        import_run(tmp_path / 'folder', tmp_path / 'run')
    change_config(tmp_path / 'folder', model_type='evil')
    with pytest.raises(UserError, match="model_type = 'evil'"):
        import_run(tmp_path / 'folder', tmp_path / 'other')
    assert not (tmp_path / 'ran').exists() and not (tmp_path / 'other').exists()


def test_command_line(tmp_path):
    """Also checks that printed commands are quoted."""
    folder, out = tmp_path / 'a folder', tmp_path / 'a run'
    make_folder(folder, 'Llama 2')
    command, importing = ['-m', 'lm_architectures.hf.export', out], ['-m', 'lm_architectures.hf.import_model']
    import_it = [*importing, folder, f'--out_dir={out}', '--tokenizer=byte']
    assert_sentence(run(*import_it[:-1]), 'has neither tokenizer.json nor')
    assert_sentence(run(*importing, tmp_path / 'none', '--tokenizer=byte'), 'has no config.json')
    advice = f"python -m lm_architectures.hf.import_model '{folder}' '--out_dir=out/a folder_run'"
    assert_sentence(run('sample.py', folder, 'abc'), advice)
    said = succeeded(run(*import_it)).stdout
    assert f"python sample.py '{out}' 'Once upon a time'; " in said and f"'--init_from={out}'\n" in said
    succeeded(run('sample.py', out, 'ab', '--max_new_tokens=5'))
    assert_sentence(run('eval.py', out, '--val'), 'give --data=FOLDER')
    assert 'back is a Hugging Face folder, Llama' in succeeded(run(*command, f'--to_hf={tmp_path / "back"}/')).stdout
    for again in ([*command, f'--to_hf={tmp_path / "back"}'], import_it):
        assert_sentence(run(*again), 'exists')
    assert_sentence(run(*command), 'expected one run and --to_hf')
    assert_sentence(run(*importing), 'expected one folder')


def start_from(source, out, data, *args):
    return run('train.py', *NO_SIZES, *args, f'--data={data}', f'--out_dir={out}', '--max_tokens=384',
               f'--init_from={source}')


@pytest.mark.slow
@pytest.mark.parametrize('name, args, keeps', [
    ('Mistral', ['--model=standard'], None), ('Qwen2', ['--model=standard', '--window=5'], None),
    ('Llama 3', ['--model=sps', '--window=4'], None),
    ('Llama 3', ['--model=nextlat', '--horizon=2'], 'dynamics.fc1.weight'),
    ('Llama 3', ['--model=context_ready', '--block=llama', '--K=3'], 'correction.down.weight')])
def test_an_imported_model_can_be_finetuned_as_any_architecture(name, args, keeps, tiny_data, tmp_path):
    """Uses the settings of the source; new parts leave the logits at step 0 unchanged.

    Standard returns to its family, also with a window that the run set, not the import.
    """
    from transformers import AutoModelForCausalLM
    theirs = make_folder(tmp_path / 'folder', name)
    import_run(tmp_path / 'folder', tmp_path / 'source')
    out, source = tmp_path / 'run', folders.read_run(tmp_path / 'source')
    records.save_run(tmp_path / 'source', source | {'data': source['data'] | {'ends': [7, 256]}})
    (tmp_path / 'source/chat_template.jinja').write_text('{{ messages }}')
    result = succeeded(start_from(tmp_path / 'source', out, tiny_data, *args))
    model, record = folders.load_run(out)
    assert record['data']['ends'] == [7, 256] and record['data']['n_rows'] == source['data']['n_rows']
    assert (out / 'chat_template.jinja').read_text() == '{{ messages }}'
    assert record['model_config']['n_kv_head'] == 2 and record['model_config']['eos_id'] is None
    if keeps:
        assert f'{keeps} ' in result.stdout.replace(',', ' ') and 'the logits differ by at most' in result.stdout
    if record['model'] == 'standard':
        export.export_run(out, tmp_path / 'back')
        again, idx = AutoModelForCausalLM.from_pretrained(tmp_path / 'back'), torch.randint(0, 256, (2, 40))
        logits = model.logits(idx)[..., :257]
        assert type(again) is type(theirs) and (again(idx).logits[..., :257] - logits).abs().max() < 1e-5
        assert (theirs(idx).logits[..., :257] - logits).abs().max() > 1e-3


@pytest.mark.parametrize('in_config, in_generation, has_end', [
    ('END', None, True), (256, [256, 'END'], True), (['END', 256], 256, True), (256, 256, False)])
def test_every_eos_id_is_printed_ends_texts_and_is_exported(in_config, in_generation, has_end, tmp_path, capsys):
    """Eos ids come from config.json, generation_config.json and the tokenizer."""
    make_folder(tmp_path / 'folder', 'Llama 2')
    model, _ = import_run(tmp_path / 'folder', tmp_path / 'plain')
    free, = generate(model, [[97, 98]], 12, temperature=0)
    text, end = free[:free.index(free[3]) + 1] if has_end else free, free[3]
    for name, value in (('config', in_config), ('generation_config', in_generation)):
        content = json.loads((tmp_path / f'folder/{name}.json').read_text()) | {'eos_token_id': value}
        (tmp_path / f'folder/{name}.json').write_text(json.dumps(content).replace('"END"', str(end)))
    import_run(tmp_path / 'folder', tmp_path / 'run')
    assert (f' ({end})' in capsys.readouterr().out) is has_end
    for options in ([], [f'--draft={tmp_path}/plain']):
        result = run('sample.py', tmp_path / 'run', 'ab', '--max_new_tokens=12', '--temperature=0', *options)
        assert f'\n{len(text)} tokens in' in '\n' + succeeded(result).stderr
    export.export_run(tmp_path / 'run', tmp_path / 'back')
    for name in ('config', 'generation_config'):
        ends = json.loads((tmp_path / f'back/{name}.json').read_text())['eos_token_id']
        assert ends == (sorted([end, 256]) if has_end else 256)


ADDED = {'__type': 'AddedToken', 'content': '<end>'}


@pytest.mark.parametrize('known, told, option, eos', [
    ('</s>', {}, None, '</s>'), ('</s>', {'eos_token': ADDED, 'bos_token': '<start>'}, None, '<end>'),
    ('<x>', {'eos_token': '<end>', 'bos_token': '<end>'}, None, '<end>'), ('<x>', {}, '<end>', '<end>'),
    ('</s>', {'eos_token': '</s>'}, '<end>', '<end>'), ('</s>', {'eos_token': '<none>'}, None, '</s>'),
    ('<x>', {'eos_token': '<none>'}, None, None), ('</s>', {}, '<none>', None)])
def test_eos_and_bos_come_from_the_option_tokenizer_config_or_known_names(known, told, option, eos, tmp_path):
    """The run keeps them, and the chat template. The tokenizer prepends <start> to texts."""
    from tokenizers import Tokenizer, processors
    from transformers import AutoTokenizer
    make_folder(tmp_path / 'folder', 'more rows than ids')
    own = Tokenizer.from_str(train_tokenizer([], 257).replace('<|endoftext|>', known))
    own.add_special_tokens(['<end>', '<start>'])
    own.post_processor = processors.TemplateProcessing(single='<start> $A', special_tokens=[('<start>', 258)])
    own.save(str(tmp_path / 'folder/tokenizer.json'))
    (tmp_path / 'folder/tokenizer_config.json').write_text(json.dumps(told | {'chat_template': '{{ messages }}'}))
    command = ['-m', 'lm_architectures.hf.import_model', tmp_path / 'folder', f'--out_dir={tmp_path}/run']
    result = run(*command, *([f'--eos_token={option}'] if option else []))
    if eos is None:
        return assert_sentence(result, f'has no eos token: expected {option or "<|endoftext|>"}')
    succeeded(result)
    assert ('lacks <none>, which transformers adds' in result.stderr) == ('<none>' in told.values())
    data = folders.read_run(tmp_path / 'run')['data']
    tokenizer, bos = load_tokenizer(data['tokenizer']), told.get('bos_token')
    assert tokenizer.eos_id == own.token_to_id(eos) and tokenizer.bos_id == (bos and own.token_to_id(bos))
    assert data['bos'] is (bos == '<start>')
    succeeded(run('-m', 'lm_architectures.hf.export', tmp_path / 'run', f'--to_hf={tmp_path}/back'))
    again = AutoTokenizer.from_pretrained(tmp_path / 'back')
    assert (again.eos_token, again.chat_template) == (eos, '{{ messages }}')
