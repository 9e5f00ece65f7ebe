"""A drafter that reads the target's KV cache and hidden states (`models/state_drafter.py`).

For verified tokens the drafter's cache holds the target's keys and values. Its slots read the
target's hidden states that predicted the last committed token; later slots may have previous-token
features. Nothing is drafted before the target's first forward pass.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from drafttrain.decoding.batching import BatchedCall, BatchedSteps
from drafttrain.decoding.drafters.candidates import PreviousTokenCorrection
from drafttrain.decoding.drafters.slots import SlotSession, longest_draft
from drafttrain.decoding.engine.architectures import check_states, position_limit
from drafttrain.decoding.engine.engine import Engine
from drafttrain.decoding.engine.forward import BatchOutput, DraftableHead, ForwardBatch, additive
from drafttrain.decoding.engine.requests import ForwardRequest
from drafttrain.decoding.padding import end_tokens
from drafttrain.decoding.roles import Drafter
from drafttrain.decoding.sampling import at_least_float32
from drafttrain.decoding.target_states import TargetRequirements, TargetState
from drafttrain.models.draftable import draftable_tokens, mask_undrafted
from drafttrain.models.previous_token import SILU_OFF
from drafttrain.models.state_drafter import StateDrafter


class StateBody:
    """The layers of a state drafter on the engine's KV cache, and the target's output projection.

    Its inputs come with the request (`ForwardRequest.embedded`).
    """

    cross_attends = False
    needs_key_positions = masks_sources = False

    def __init__(self, model: StateDrafter, output: nn.Module, draftable: Tensor | None) -> None:
        self.model, self.device = model, model.device
        self.output, self.modules = output, [model, output]
        self._head = None if draftable is None else DraftableHead(output, draftable)

    def prepared(self, layers: Sequence[int]) -> AbstractContextManager[None]:
        if self._head is not None:
            self._head.refresh()
        return nullcontext()

    def compute(self, call: ForwardBatch) -> BatchOutput:
        mask = additive(call.visible, self.model.dtype)[:, None]
        hidden = self.model.decoder(
            inputs_embeds=call.embedded.to(self.model.dtype),
            attention_mask=mask,
            position_ids=call.positions,
            past_key_values=call.cache,
            use_cache=True,
        )[0]
        scored = hidden if call.scored is None else hidden[:, call.scored]
        head = self._head or self.output
        logits = at_least_float32(head(scored.to(self.output.weight.dtype)))
        if self._head is not None:
            logits = mask_undrafted(logits, self._head.draftable)
        return BatchOutput(logits, hidden)


class TargetStatesSession(SlotSession):
    """One sequence. Its cache holds the target's keys and values, then those of its own slots."""

    verified = 0
    """Number of tokens whose keys and values were copied from the target."""

    def token_before(self, tokens: Tensor) -> int:
        return self.drafter.no_token

    def longest(self, tokens: Tensor, most: int, target_state: TargetState | None) -> int:
        if target_state is None:
            return 0
        self._target_state, length = target_state, len(tokens)
        most = min(most, self.drafter.longest_block - (length - target_state.committed))
        return longest_draft(most, self.drafter.position_limit, length)

    def slot_rows(self, tokens: Tensor, slots: int) -> BatchedSteps[tuple[Tensor, Tensor]]:
        """Copies the keys and values of newly verified tokens from the target; drops earlier slots.
        After tokens drafted by others, the later slots continue."""
        state, target, drafter = self.state, self._target_state, self.drafter
        if state is None:
            state = self.state = yield BatchedCall(drafter.engine.begin, self.source)
        state.settle(self.verified)
        known = target.committed - 1
        if self.verified < known:
            layers = drafter.requires.context_layers
            keys_values = target.columns.keys_values(layers, self.verified, known)
            new = tokens[self.verified : known].tolist()
            drafter.engine.take(state, new, keys_values.to(drafter.model.dtype))
            self.verified = known
        newest = [target.hidden[layer][-1] for layer in drafter.model.config.state_layers]
        count = len(tokens) - known - 1 + slots  # slots of tokens drafted by others included
        ids = tokens[known].expand(count).to(newest[0].device)
        inputs = drafter.model.slot_inputs(
            drafter.model.anchor_inputs(torch.stack(newest)[None]).expand(count, -1, -1),
            F.embedding(ids, drafter.embedding),
            torch.arange(count, device=ids.device),
        )
        request = ForwardRequest(state, ids.tolist(), slots, embedded=inputs)
        score = yield BatchedCall(drafter.engine.forward_batch, request)
        return score.hidden[-slots:], score.logits


class TargetStatesDrafter(Drafter):
    """Drafts blocks from the target's KV cache and hidden states.

    Raises ValueError if the target's layers encode positions other than by rotary embeddings.
    """

    name = "state-drafter"
    session = TargetStatesSession

    def __init__(self, model: StateDrafter, target: PreTrainedModel) -> None:
        check_states(target.config)
        config = model.config
        self.model, self.target = model.eval(), target
        self.longest_block: int = config.k
        """Most tokens of a draft, the number of trained slots."""
        self.position_limit = position_limit(target.config)
        layers, context_layers = tuple(config.state_layers), tuple(config.context_layers)
        self.requires = TargetRequirements(layers, context_layers=context_layers)
        self.eos_ids = frozenset(end_tokens(target.generation_config))
        self.embedding = target.get_input_embeddings().weight.detach()
        self.output = target.get_output_embeddings()
        self.vocabulary: int = self.output.out_features
        self.no_token = len(self.embedding)
        """Placeholder for the previous token of the first slot, which already reads it as input."""
        draftable = draftable_tokens(config, self.vocabulary)
        if draftable is not None:
            draftable = draftable.to(model.device)
        self.body = StateBody(model, self.output, draftable)
        self.engine = Engine(self.body, None, self.position_limit)
        self.correction = None if model.previous_token is None else self._make_correction()
        """Previous-token features of the later slots of a block."""

    @torch.inference_mode()
    def _make_correction(self) -> PreviousTokenCorrection:
        """Computes the features of every token, then those of `no_token`, which correct nothing."""
        correction = self.model.previous_token
        rows = self.output.weight.to(correction.out.weight.dtype) @ correction.out.weight
        features = F.pad(correction.features(self.embedding), (0, 0, 0, 1), value=SILU_OFF)
        return PreviousTokenCorrection(correction.hidden, rows, features)
