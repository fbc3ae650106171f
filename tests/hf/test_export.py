"""Exports: every architecture and tokenizer works in transformers and lm-eval."""
import runpy
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import MODELS, ROOT, make_run, saved_bytes
from packaging.version import Version
from safetensors.torch import save_file

from lm_architectures.data.text.tokenizers import load_tokenizer
from lm_architectures.data.text.train_tokenizer import train_tokenizer
from lm_architectures.files import UserError
from lm_architectures.hf import export
from lm_architectures.hf import tokenizers as hf_tokenizers
from lm_architectures.run import checkpoint, folders, models, records
from lm_architectures.score.scoring import Scorer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings('ignore'), pytest.mark.usefixtures('code_folder')]
transformers = pytest.importorskip('transformers')
pytest.importorskip('lm_eval')
from lm_architectures.score.lm_eval_adapter import RunLM

TEXTS = ['a text of some words', "Hello  world, don't\r\n\t 12345", ' a naïve 日本 ☃\n\nx', '']


def assert_lm_eval_agrees(folder, model, own, ends=None):
    """Check that lm-eval's model on the export scores and generates like ours on the run."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    lm = HFLM(pretrained=str(folder), trust_remote_code=True, device='cpu', dtype='float32', batch_size=2,
              add_bos_token=bool(own.start))
    ours = RunLM(Scorer(model, 64), own, ends)

    def ask(kind, *pairs):
        return [Instance(kind, {}, pair, i) for i, pair in enumerate(pairs)]
    pairs = ask('loglikelihood', ('a text', ' of words'), ('', 'Hello  world'), ('some words a ' * 30, ' text'))
    for (a, is_a), (b, is_b) in zip(lm.loglikelihood(pairs), ours.loglikelihood(pairs)):
        assert abs(a - b) < 1e-5 and is_a == is_b
    options = {'until': ['\n'], 'max_gen_toks': 12, 'do_sample': False}
    asked = ask('generate_until', *((text, options) for text in ('a text', 'some words of a', *'Heltwrdi')))
    assert lm.generate_until(asked) == ours.generate_until(asked)
    lm.add_bos_token = False  # else it also scores bos
    texts = ask('loglikelihood_rolling', ('of some words',), (' Hello  world' * 40,))
    assert lm.loglikelihood_rolling(texts) == pytest.approx(ours.loglikelihood_rolling(texts), abs=1e-4)


def load_exported(folder, kind=transformers.AutoModelForCausalLM):
    return kind.from_pretrained(folder, trust_remote_code=True)


@pytest.mark.parametrize('name', MODELS)
def test_every_architecture_runs_in_transformers(tmp_path, name):
    """Checks logits, states, padding on both sides, cached generation, beam search, the loss."""
    needs_gpu = {'attention': 'triton', 'head_size': 32} if name in ('standard', 'sps') else {}  # read as `auto`
    if name == 'standard':
        needs_gpu['rope_scaling'] = (8.0, 1.0, 4.0, 32.0)
    model, _ = make_run(tmp_path / 'run', name, eos_id=256 if name in ('standard', 'sps') else None, **needs_gpu)
    export.export_run(tmp_path / 'run', tmp_path / name, exact=True)
    theirs = load_exported(tmp_path / name)
    assert getattr(theirs.model.config, 'rope_scaling', None) == getattr(model.config, 'rope_scaling', None)  # a tuple
    theirs.save_pretrained(tmp_path / 'again')
    idx, mask = torch.randint(0, 256, (3, 20)), torch.ones(3, 20, dtype=torch.int64)
    mask[1, :5], mask[2, 17:] = 0, 0
    with torch.no_grad():
        logits, (states,) = theirs(idx, attention_mask=mask, output_hidden_states=True, return_dict=False)
        assert logits.shape[-1] == 257
        for row, real in zip(range(3), (slice(0, 20), slice(5, 20), slice(0, 17))):
            for found, want in ((logits, model.logits), (states, model.final_hidden)):
                want = want(idx[row:row + 1, real])[0, :, :found.shape[-1]]
                assert (found[row, real] - want).abs().max() < 1e-5
        headless = load_exported(tmp_path / name, transformers.AutoModel)
        assert headless(idx, attention_mask=mask).last_hidden_state.equal(states)
    mask[2] = 1
    for options in (dict(attention_mask=mask), dict(attention_mask=mask, num_beams=2)):
        cached, whole = (theirs.generate(idx, max_new_tokens=8, do_sample=False, pad_token_id=256, use_cache=use_cache,
                                         **options) for use_cache in (True, False))
        assert torch.equal(cached, whole)
    targets = torch.cat([idx[:, 1:], torch.full((3, 1), -1)], 1)
    assert torch.isclose(theirs(idx, labels=idx).loss, model(idx, targets)['loss'], atol=1e-5)
    assert theirs.get_input_embeddings() is theirs.model.embed and not theirs.accepts_loss_kwargs
    with pytest.raises(ValueError, match='the model has 257 ids, which cannot change'):
        theirs.resize_token_embeddings(300)


@pytest.mark.parametrize('exact', [True, False])
def test_the_model_card_says_what_was_trained_and_how_to_load_it(tiny_run, tmp_path, exact):
    from huggingface_hub import ModelCard
    export.export_run(tiny_run, tmp_path / 'hf', exact)
    card, record = ModelCard.load(tmp_path / 'hf/README.md'), folders.read_run(tiny_run)
    log, weights = records.read_log(tiny_run), checkpoint.load_checkpoint(tiny_run)[1]
    assert (card.data.license, card.data.library_name) == ('unknown', 'transformers')
    for part in (f'# {tiny_run.name}\n', 'arXiv 2607.01218', '| training tokens | 2,560 |', '| training step | 20 |',
                 f'| validation loss, nats per token | {log[-1]["val"]:.4f} |', '| learning_rate | `0.01` |',
                 f'| parameters | {sum(p.numel() for p in weights.values()):,} |', '| training data | tiny |',
                 f'| written as | {"the model code" if exact else "Llama"} |',
                 f'"n_embd": {record["model_config"]["n_embd"]}'):
        assert part in card.text, card.text
    assert ('trust_remote_code' in card.text) is exact and str(tiny_run.parent) not in card.content


def exported(tmp_path, name, **settings):
    """Write a run with random weights, export it with its code, and load that."""
    make_run(tmp_path / 'run', name, **settings)
    export.export_run(tmp_path / 'run', tmp_path / 'hf', exact=True)
    return load_exported(tmp_path / 'hf')


WHY_IT_FAILS = export.why_it_fails
USES_SCANS = '''
import scans
from scans import gdn, pinned  # x
from scans.gdn import (
    PINS,
    SMALL as small)
try:
    import scans as s
except ModuleNotFoundError:
    s = None
from model_standard import Config
from mylib.layers import Model
'''

def test_an_export_works_without_the_repository(tmp_path, monkeypatch):
    """It has helper packages, but no scans/, which would miss adapters. Else it is not written."""
    monkeypatch.setattr(models, 'ADDED', {})
    monkeypatch.setattr(export, 'why_it_fails', WHY_IT_FAILS)
    (tmp_path / 'mylib').mkdir()
    (tmp_path / 'mylib/layers.py').write_text('from model_standard import Model')
    (tmp_path / 'model_mine.py').write_text(USES_SCANS)
    make_run(tmp_path / 'run', models.add_file(str(tmp_path / 'model_mine.py')))
    export.export_run(tmp_path / 'run', tmp_path / 'hf', exact=True)
    text = (tmp_path / 'hf/model_mine.py').read_text()
    for part in ('\nscans = None  #', '\ngdn = pinned = None  #', '\nPINS = small = None  #', '\n    raise ModuleNotF'):
        assert part in text and 'lm_architectures' not in text


def test_an_export_that_fails_elsewhere_is_not_written(tmp_path, monkeypatch):
    """What the other process says of wrong logits is seen in this one."""
    exported(tmp_path, 'standard')
    save_file({'tokens': torch.tensor([[1, 2]]), 'logits': torch.zeros(1, 2, 257)}, tmp_path / 'reference')
    monkeypatch.setattr(sys, 'argv', ['loading.py', str(tmp_path / 'hf'), str(tmp_path / 'reference')])
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match='its logits differ from those of the run'):
        for name in ('lm_architectures', 'attn_kernels'):  # only to restore them
            patch.setitem(sys.modules, name, None)
        runpy.run_path(ROOT / 'lm_architectures/hf/loading.py')
    monkeypatch.setattr(export, 'why_it_fails', lambda *args: 'a reason')
    with pytest.raises(UserError, match='bad is not written, because .*: a reason'):
        export.export_run(tmp_path / 'run', tmp_path / 'bad')
    assert not [*tmp_path.glob('*bad*')]


def batches():
    """Return three texts, and model inputs with their labels: packed, and padded on both sides."""
    torch.manual_seed(0)
    texts = [torch.randint(0, 256, (1, n)) for n in (7, 9, 5)]
    labels = [F.pad(text[:, 1:], (1, 0), value=-100) for text in texts]  # nothing predicts a first token
    packed = {'input_ids': torch.cat(texts, 1), 'position_ids': torch.tensor([[*range(7), *range(9), *range(5)]]),
              'labels': torch.cat(labels, 1)}
    padded = {name: torch.cat([F.pad(x, place, value=fill) for x, place in zip(rows, ((1, 1), (0, 0), (0, 4)))])
              for name, rows, fill in (('input_ids', texts, 3), ('labels', labels, -100),
                                       ('attention_mask', map(torch.ones_like, texts), 0))}
    return texts, packed, padded


@pytest.mark.parametrize('name', ['gpn', 'nextlat', 'bst'])
def test_packed_and_padded_texts_are_as_if_alone(tmp_path, name):
    """The loss weights texts as train.py does micro-batches: BST's by pairs."""
    model, (texts, *inputs) = exported(tmp_path, name, eos_id=256 if name == 'nextlat' else None).eval(), batches()
    alone, count = [model(text, labels=text) for text in texts], getattr(model.model, 'loss_count', None)
    n = [count(x, F.pad(x[:, 1:], (0, 1), value=-1)) if count else x.shape[1] - 1 for x in texts]
    model = load_exported(tmp_path / 'hf').eval()  # it does not know yet whether its loss may read padding
    for kind in (*inputs, *inputs):
        found, is_token = model(**kind), kind.get('attention_mask', torch.ones_like(kind['input_ids'])) > 0
        torch.testing.assert_close(found.loss, sum(one.loss * i for one, i in zip(alone, n)) / sum(n))
        torch.testing.assert_close(found.logits[is_token], torch.cat([x.logits[0] for x in alone]), rtol=0, atol=1e-5)


def test_inputs_mean_what_they_mean_to_a_llama(tmp_path):
    ours, (_, packed, padded) = exported(tmp_path, 'standard', pad_rows_in_loss=False).eval(), batches()
    export.export_run(tmp_path / 'run', tmp_path / 'llama')
    llama, idx = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'llama'), packed['input_ids']
    for inputs in (packed, padded):
        a, b = (model(**inputs, use_cache=False) for model in (ours, llama))  # Llama packs without a cache only
        is_token = inputs.get('attention_mask', torch.ones_like(idx)) > 0
        torch.testing.assert_close(a.logits[is_token], b.logits[is_token], rtol=0, atol=1e-5)
        torch.testing.assert_close(a.loss, b.loss)
    for keep in (0, 2, 99, torch.tensor([1, 6])):
        a, b = (model(idx, logits_to_keep=keep).logits for model in (ours, llama))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_inputs_that_would_be_ignored_are_refused(tmp_path):
    model, (_, packed, padded) = exported(tmp_path, 'sps'), batches()
    ids, positions = ({name: packed[name]} for name in ('input_ids', 'position_ids'))
    hole = torch.ones(1, 21).index_fill(1, torch.tensor(4), 0)
    for function, inputs, sentence in (
            (model, {'attention_mask': hole}, 'has a hole'), (model, {'attention_mask': hole[None]}, r'\[1, 1, 21\]'),
            (model, {'position_ids': packed['position_ids'] + 1}, 'count from 0 in each text'),
            (model, positions | {'attention_mask': hole * 0 + 1}, 'without attention_mask'),
            (model, {'cu_seq_lens_q': torch.tensor([0, 21])}, 'cu_seq_lens_q is not supported'),
            (model, {'inputs_embeds': torch.zeros(1, 2, 32)}, 'inputs_embeds is not supported'),
            (model, {'output_attentions': True}, 'output_attentions is not supported'),
            (model.generate, {'output_attentions': True}, 'output_attentions is not supported'),
            (model.generate, {'output_hidden_states': True, 'return_dict_in_generate': True}, 'no hidden states'),
            (model.generate, positions, 'one text per row'),
            (model.generate, {'input_ids': padded['input_ids'], 'attention_mask': padded['attention_mask']},
             "set the tokenizer's padding_side to 'left'")):
        with pytest.raises(ValueError, match=sentence):
            function(**{**ids, **inputs})


def test_transformers_serve_can_load_and_run_it(tmp_path):
    """It looks for the class in transformers, and gives its tokenizer to `generate`."""
    exported(tmp_path, 'sps')
    names = transformers.AutoConfig.from_pretrained(tmp_path / 'hf', trust_remote_code=True).architectures
    model = load_exported(tmp_path / 'hf', getattr(transformers, names[0]))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / 'hf', trust_remote_code=True)
    inputs, options = tokenizer('a text', return_tensors='pt'), {'max_new_tokens': 8, 'do_sample': False}
    found = model.generate(**inputs, **options, tokenizer=tokenizer, stop_strings=['never said'])
    assert found.equal(model.generate(**inputs, **options))


def test_trl_trains_the_next_token_loss(tmp_path):
    """It applies the head by itself, to states that have gradients."""
    trl = pytest.importorskip('trl')
    from datasets import Dataset
    model, texts = exported(tmp_path, 'context_ready', K=3).train(), Dataset.from_dict({'text': TEXTS[:3]})
    args = trl.SFTConfig(str(tmp_path), max_steps=5, learning_rate=0.01, packing=True, logging_steps=1, use_cpu=True,
                         bf16=False, gradient_checkpointing=False, save_strategy='no', report_to=[], disable_tqdm=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / 'hf', trust_remote_code=True)
    trainer = trl.SFTTrainer(model, args, train_dataset=texts, processing_class=tokenizer)
    batch, nats = next(iter(trainer.get_train_dataloader())), []
    for text in batch['input_ids'][0].tensor_split((batch['position_ids'][0] == 0).nonzero()[1:, 0]):
        logits = model.model._logits(model.model.final_hidden(text[None, :-1]))[0]
        nats += F.cross_entropy(logits, text[1:], reduction='none')
    before = model.model.embed.weight.clone()
    trainer.train()
    losses = [line['loss'] for line in trainer.state.log_history if 'loss' in line]
    assert losses[0] == pytest.approx(float(sum(nats) / len(nats)), abs=1e-4) and losses[-1] < losses[0]
    assert not model.model.embed.weight.equal(before)
    model.model._logits = lambda h: torch.tanh(model.model.head(h))
    with pytest.raises(ValueError, match="logits are more than its head's output"):
        trainer.compute_loss(model, batch)


def test_trainer_accumulates_gradients(tmp_path):
    """Four micro-batches give the loss and the weights of one batch."""
    pytest.importorskip('accelerate')
    exported(tmp_path, 'nextlat')
    idx, found = torch.randint(0, 256, (16, 20)), []
    rows = [{'input_ids': row, 'labels': row} for row in idx]
    for n in (1, 4):
        args = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=8 // n, gradient_accumulation_steps=n, max_steps=2, optim='sgd',
            learning_rate=0.1, logging_steps=1, save_strategy='no', report_to=[], disable_tqdm=True, use_cpu=True)
        trainer = transformers.Trainer(load_exported(tmp_path / 'hf'), args, train_dataset=rows)
        trainer.train()
        found.append((trainer.model, [line['loss'] for line in trainer.state.log_history[:2]]))
    (a, losses), (b, same_losses) = found
    assert losses == pytest.approx(same_losses, abs=1e-5)
    assert max((p - q).abs().max() for p, q in zip(a.parameters(), b.parameters())) < 1e-6


def test_a_training_step_runs_the_model_once(tmp_path):
    """In training mode with labels there are no logits. Evaluation has both."""
    model, idx, calls = exported(tmp_path, 'sps'), torch.randint(0, 256, (2, 20)), []
    model.model.blocks[0].register_forward_hook(lambda *args: calls.append(1))
    for is_training, n_calls in ((True, 1), (False, 2)):
        found = model.train(is_training)(idx, labels=idx)
        assert len(calls) == n_calls and (found.logits is None) == is_training and found.loss.requires_grad
        calls.clear()


def test_gradient_checkpointing_where_the_model_has_it(tmp_path):
    model, idx = exported(tmp_path, 'sps').train(), torch.randint(0, 256, (2, 20))
    saved = saved_bytes(lambda: model.model.final_hidden(idx))
    model(idx, labels=idx).loss.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable()
    assert saved_bytes(lambda: model.model.final_hidden(idx)) < saved / 2
    model(idx, labels=idx).loss.backward()
    assert all(torch.allclose(p.grad, grad, atol=1e-6) for p, grad in zip(model.parameters(), grads))
    with pytest.raises(ValueError, match='does not support'):
        exported(tmp_path / 'gpn', 'gpn').gradient_checkpointing_enable()


@pytest.mark.parametrize('name, targets, settings', [
    ('gpn', 'all-linear', {}), ('context_ready', 'all-linear', {}), ('sps', ['embed'], {'tied_head': False}),
    ('nextlat', ['head'], {})])
def test_lora_reaches_every_layer_and_merges(tmp_path, name, targets, settings):
    peft = pytest.importorskip('peft')
    model, idx = exported(tmp_path, name, **settings), torch.randint(0, 256, (2, 20))
    plain = model(idx).logits.detach()
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets, task_type='CAUSAL_LM')).train()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(5):
        losses.append(model(idx, labels=idx).loss)
        losses[-1].backward()
        unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        optimizer.step()
        optimizer.zero_grad()
    assert losses[4] < losses[0] and not unused
    for p in model.parameters():
        p.data += 0.05 * torch.randn_like(p) * p.requires_grad  # also rows that no gradient reached
    adapted, options = model.eval()(idx, labels=idx), dict(max_new_tokens=9, do_sample=False, pad_token_id=256)
    assert (adapted.logits - plain).abs().max() > 1e-2
    cached, whole = (model.generate(input_ids=idx, use_cache=use_cache, **options) for use_cache in (True, False))
    assert cached.equal(whole)
    model.save_pretrained(tmp_path / 'adapter')
    again = peft.PeftModel.from_pretrained(load_exported(tmp_path / 'hf'), tmp_path / 'adapter')
    assert again(idx).logits.equal(adapted.logits)
    merged = model.merge_and_unload()(idx, labels=idx)
    assert (merged.logits - adapted.logits).abs().max() < 1e-5 and abs(merged.loss - adapted.loss) < 1e-5


def test_an_adapter_that_would_miss_a_shared_module_is_refused(tmp_path):
    model = exported(tmp_path, 'context_ready', variant='tied')
    model.model.blocks[1].ffn.up = torch.nn.Linear(32, 128)  # as PEFT replaces one of the two
    with pytest.raises(ValueError, match='model.blocks.1.ffn.up and model.correction.up are one module'):
        model(torch.zeros(1, 4, dtype=torch.int64))


@pytest.fixture(scope='module')
def tokenizers(tmp_path_factory):
    import sentencepiece
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    folder = tmp_path_factory.mktemp('tokenizers')
    (folder / 'own.json').write_text(train_tokenizer(TEXTS * 40, 280))
    fast = Tokenizer.from_file(str(folder / 'own.json'))
    fast.add_special_tokens(['<s>'])
    fast.save(str(folder / 'plain.json'))
    fast.post_processor = TemplateProcessing(single='<s> $A', special_tokens=[('<s>', fast.token_to_id('<s>'))])
    fast.save(str(folder / 'starts.json'))
    for kind, options in (('bpe', dict(vocab_size=300, byte_fallback=True)), ('unigram', dict(vocab_size=60))):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TEXTS * 40), model_prefix=str(folder / kind), model_type=kind, minloglevel=2,
            hard_vocab_limit=False, user_defined_symbols=['<sep>'], **options)
    return folder


@pytest.mark.parametrize('name, bos, ends', [
    ('byte', False, None), ('own.json', False, [0, *range(60, 200)]), ('plain.json', True, None),
    ('starts.json', True, None), ('starts.json', False, None), ('bpe.model', False, None), ('bpe.model', True, None),
    ('unigram.model', True, None)])
def test_every_tokenizer_is_exported(tokenizers, tmp_path, name, bos, ends):
    """Ids, eos and bos are the same, whatever post-processor the tokenizer file has."""
    pytest.importorskip('google.protobuf')
    model, own = make_run(tmp_path / 'run', 'sps', name if name == 'byte' else tokenizers / name, bos, ends)
    if name.endswith('.model') and Version(transformers.__version__) < Version('5.24'):  # 3.10 has 5.20
        with pytest.raises(UserError, match='converts .* to a tokenizer with other ids'):
            export.export_run(tmp_path / 'run', tmp_path / 'hf')
        return
    export.export_run(tmp_path / 'run', tmp_path / 'hf')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / 'hf', trust_remote_code=True)
    for text in TEXTS:
        ids = [*own.start, *own.encode(text)]
        assert theirs(text).input_ids == ids
        for part in (ids, ids[2:]):  # the second may start with a space
            assert theirs.decode(part, skip_special_tokens=True) == own.decode_text(part)
    assert (theirs.eos_token_id, theirs.bos_token_id) == (own.eos_id, own.bos_id if bos else None)
    assert_lm_eval_agrees(tmp_path / 'hf', model, own, ends)


def test_a_tokenizer_that_transformers_converts_wrongly_is_refused(tokenizers, monkeypatch):
    pytest.importorskip('google.protobuf')
    monkeypatch.setattr(hf_tokenizers, 'load_tokenizer', lambda name: SimpleNamespace(encode=lambda text: [0]))
    with pytest.raises(UserError, match='converts .*bpe.model to a tokenizer with other ids'):
        hf_tokenizers.fast_tokenizer(str(tokenizers / 'bpe.model'))


def test_exported_gpt2_and_task_tokenizers_give_the_same_ids(tmp_path, monkeypatch):
    """GPT-2's merges are reconstructed from tiktoken's ranks."""
    from lm_architectures.hf.tokenizers import byte_level, save_tokenizer
    ranks = {bytes([i]): i for i in range(256)} | {b'ab': 256, b'cd': 257, b'abcd': 258, b' abcd': 259}
    import tiktoken
    bpe = tiktoken.Encoding('own', pat_str=r"'s| ?\w+|\s+", mergeable_ranks=ranks, special_tokens={})
    for text in ('abcd abcd', 'cdab xabcdd  ab', 'bcda'):
        assert byte_level(ranks).encode(text).ids == bpe.encode(text)
    name = 'path_star:degree=2,length=3,nodes=8,train_rows=20,val_rows=4'
    save_tokenizer(tmp_path, name, False, 32)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert theirs('1,2|3,4/1,2=').input_ids == load_tokenizer(name).encode('1,2|3,4/1,2=')


@pytest.mark.parametrize('tokenizer', ['byte', 'a5:length=4'])
def test_a_qwen2_with_another_tokenizer_says_so(tokenizer, tmp_path, capsys):
    make_run(tmp_path / 'run', tokenizer=tokenizer, qkv_bias=True)
    export.export_run(tmp_path / 'run', tmp_path / 'hf')
    assert 'AutoTokenizer splits the texts of a Qwen2 with its own rules' in capsys.readouterr().out


EDITS = {  # of model_standard.py: text, its replacement, and so on
    'nothing': ('', ''), 'its loss': ("total['nll'] /", "2 * total['nll'] /"),
    'a later layer': ('h = h + self.attn_out', 'h = h * (1 + 0.1 * (self.layer == 1)) + self.attn_out'),
    'its window': ('self.reach)', '2 * self.reach)'), 'an id': ('self.embed(idx)', 'self.embed(idx.clamp(min=1))'),
    'its scores': ('    def sees', '    def score_bias(self, q, k, head):\n        return 0.1 * (k.pos - q.pos)\n\n'
                                   '    def sees'),
    'its mask': ('class Block', 'import attn_kernels\n\n\ndef make_mask(model, *args):\n    model.reach = 5\n'
                                '    return attn_kernels.make_mask(model, *args)\n\n\nclass Block'),
    'its width': ('        self.config = config', '        self.config = config\n        assert config.n_embd == 32'),
    'its buffers': ('        self.config = config', "        self.config = config\n"
                    "        self.register_buffer('count', torch.tensor(3))\n"
                    "        self.register_buffer('scale', torch.tensor([2.0]), persistent=False)",
                    'self.head(h)', 'self.head(h) * self.scale * self.count'),
    'attn_kernels': ()}


@pytest.mark.parametrize('edit', EDITS)
def test_edited_equations_are_never_exported_as_the_original(edit, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(models, 'ADDED', {})
    source, code = (ROOT / 'model_standard.py').read_text(), None
    file = tmp_path / f'model_{edit.replace(" ", "_")}.py'
    for old, new in zip(EDITS[edit][::2], EDITS[edit][1::2]):
        source = source.replace(old, new, 1)
    file.write_text(source)
    make_run(tmp_path / 'run', models.add_file(str(file)), window=7)
    if edit == 'attn_kernels':
        code, copy = 'run', tmp_path / 'run/code/attn_kernels.py'
        copy.write_text(copy.read_text().replace('.softmax(-1)', '.mul_(2).softmax(-1)'))
    export.export_run(tmp_path / 'run', tmp_path / 'hf', code=code)
    assert ('because a narrow copy of it fails (AssertionError' in capfd.readouterr().err) == (edit == 'its width')
    model, idx = folders.load_run(tmp_path / 'run', code=code)[0], torch.arange(20)[None]
    theirs = load_exported(tmp_path / 'hf')
    assert torch.allclose(theirs(idx).logits, model.logits(idx)[..., :257], atol=1e-4)
    assert isinstance(theirs, transformers.MistralForCausalLM) is (edit in ('nothing', 'its loss'))
