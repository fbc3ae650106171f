"""Forks as researchers write them: experts, a hybrid with its own cache, windows, and mistakes."""
import shutil

import pytest
import torch
from conftest import ROOT, assert_sentence, losses, run, succeeded, train_tiny
from variants import decode_in_pieces, make_model

from lm_architectures.run import folders, models, records

pytestmark = pytest.mark.slow
RETURN = "        return {'loss': loss, 'nll': loss.detach()}"
EXPERTS = ('''        self.gate_up = nn.Linear(C, 2 * n_ffn, bias=False)
        self.ffn_out = nn.Linear(n_ffn, C, bias=False)
''', '''        self.router = nn.Linear(C, 4, bias=False)
        expert = lambda: nn.Sequential(nn.Linear(C, n_ffn), nn.GELU(), nn.Linear(n_ffn, C))
        self.experts = nn.ModuleList(expert() for _ in range(4))
        self.experts.active_share = 2 / 4
'''), ('''        gate, up = self.gate_up(self.ffn_norm(h)).chunk(2, -1)
        return h + self.ffn_out(F.silu(gate) * up)
''', '''        x, out = self.ffn_norm(h), torch.zeros_like(h)
        p = self.router(x).softmax(-1)
        weights, chosen = p.topk(2, -1)
        self.balance = 4 * (F.one_hot(chosen, 4).float().mean((0, 1, 2)) * p.mean((0, 1))).sum()
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).any(-1)
            out[rows] += (weights * (chosen == i)).sum(-1, keepdim=True)[rows] * expert(x[rows])
        return h + out
'''), (RETURN, '''        balance = sum(block.balance for block in self.blocks)
        return {'loss': loss + 0.01 * balance, 'nll': loss.detach(), 'balance': balance.detach()}
''')
HYBRID = ('        h = self.embed(idx)\n', '        h = self.leak(self.embed(idx), cache)\n'), (
    '    def sees(self, q, k):\n', '''    def leak(self, e, cache):
        """Return s_t = s_{t-1} / 2 + e_t for each token. cache.s has s after each position."""
        row = torch.arange(len(e))[:, None]
        states = [e[:, :1] * 0 if cache is None else cache.s[row, cache.lengths[:, None]]]
        for t in range(e.shape[1]):
            states.append(states[-1] / 2 + e[:, t:t + 1])
        states = torch.cat(states[1:], 1)
        if cache is not None:
            cache.s[row, cache.lengths[:, None] + 1 + torch.arange(e.shape[1])] = states
        return states

    def sees(self, q, k):
'''), ('        return KVCache(self, batch_size, max_tokens, max_call, device, dtype)\n', '''
        cache = KVCache(self, batch_size, max_tokens, max_call, device, dtype)
        cache.s = torch.zeros(batch_size, 2 * max_tokens + 1, self.config.n_embd)
        return cache
''')
WINDOWS = ('    def sees(self, q, k):\n', '''    @property
    def sees(self):
        return [self.near, self.all] * 2

    def near(self, q, k):
        return self.all(q, k) & (q.pos - k.pos <= 5)

    def all(self, q, k):
'''), ('masks[keys, queries], positions', 'masks[keys, queries][layer], positions')


@pytest.fixture
def fork(tmp_path):
    """Return a function that writes an edited copy of a model file, and returns its path."""
    def write(*edits, source='standard'):
        text = (ROOT / f'model_{source}.py').read_text()
        for before, after in edits:
            assert text.count(before) == 1, before
            text = text.replace(before, after)
        (tmp_path / 'model_fork.py').write_text(text)
        return str(tmp_path / 'model_fork.py')
    yield write
    models.ADDED.clear()


def test_experts_count_their_active_share_and_their_balance_is_logged(fork, tiny_data, tmp_path):
    path, out, C, F, T = fork(*EXPERTS), tmp_path / 'out', 16, 48, 32
    succeeded(train_tiny(tiny_data, out, f'--model={path}', steps=2))
    last = records.read_log(out)[-1]
    assert last['loss'] == pytest.approx(last['nll'] + 0.01 * last['balance']) and last['balance'] >= 2
    layer = 4 * C * C + 4 * C + 2 * 2 * C * F  # attention, router, two of four experts
    model, _ = folders.load_run(out)
    assert model.flops_per_token(T) == 6 * (2 * layer + C * 320) + 12 * 2 * C * (T + 1) / 2
    dry = succeeded(train_tiny(tiny_data, out, f'--model={path}', '--dry_run')).stdout
    assert 'moments; activations are left out: without data, a step fails in model_fork.py, line ' in dry


def test_a_hybrid_with_its_own_cache_resumes_bitwise_and_decodes(fork, tiny_data, tmp_path):
    path, out = fork(*HYBRID), tmp_path / 'out'
    succeeded(train_tiny(tiny_data, out, f'--model={path}', '--mask_documents=False'))
    want = losses(out)
    shutil.rmtree(out / 'ckpt/step_00000020')
    succeeded(run('train.py', f'--out_dir={out}', '--resume'))
    assert losses(out) == want
    decode_in_pieces(make_model('fork', dict(eos_id=None)), torch.randint(0, 60, (3, 40)), 4)


def test_windows_that_alternate_in_sps_count_each_layers_keys_and_decode(fork):
    models.add_file(fork(*WINDOWS, source='sps'))
    values, T = dict(eos_id=None, n_layer=4, window=3), 40

    def keys(reach):
        x = [sum(min(i, r) + 1 for i in range(T)) for r in reach]
        rho = [sum(min(i, r, 3) for i in range(T)) for r in reach]  # for x; one more for rho
        return sum(2 * (a + b) + T for a, b in zip(x, rho)) / T - (x[-1] + rho[-1]) / T  # the last layer asks as rho
    ours, plain = make_model('fork', values), make_model('sps', values)
    assert ours.flops_per_token(T) - plain.flops_per_token(T) == 12 * 32 * (keys([5, T] * 2) - keys([T] * 4))
    decode_in_pieces(ours, torch.randint(0, 60, (3, 40)), 4)


FORWARDS = {  # what it returns, and what is wrong
    'loss': "Tensor with a wrong or missing 'loss'", 'self.logits(idx), loss': "tuple with a wrong or missing 'loss'",
    "{'nll': loss}": "'loss'", "{'loss': loss}": "'nll'", "{'loss': loss.detach(), 'nll': loss}": "'loss'",
    "{'loss': loss, 'nll': loss, 'x': loss[None]}": "'x'"}


@pytest.mark.parametrize('edit, sentence', [
    *(((RETURN, f'        return {what}'), f"{said} (docs/own_model.md)") for what, said in FORWARDS.items()),
    (WINDOWS[0], 'for block, layer_mask in zip(self.blocks, mask)'),
    (('@dataclass\n', ''), 'is not a dataclass')], ids=str)
def test_a_wrong_model_is_a_sentence_before_the_first_step(fork, tiny_data, tmp_path, edit, sentence):
    path = fork(edit)
    for more in ([], ['--dry_run']):
        assert_sentence(train_tiny(tiny_data, tmp_path / 'out', f'--model={path}', *more), sentence)
    assert not (tmp_path / 'out').exists()


def test_parameters_without_a_gradient_are_named_once(fork, tiny_data, tmp_path):
    path = fork(('        self.norm = ', '        self.spare = nn.Linear(4, 4)\n        self.norm = '))
    said = succeeded(train_tiny(tiny_data, tmp_path / 'out', f'--model={path}', steps=3)).stderr
    assert said == 'the loss does not depend on spare.weight, spare.bias: no gradient in the first step\n'
