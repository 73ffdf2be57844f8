"""`/v1/predict`: rows in, answers out, prompted and decoded as `spotune predict` does."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from spotune_serve.gateway.answers import Answer, AnswerPart
from spotune_serve.gateway.routes.openai_api import plan_choices
from spotune_serve.gateway.routes.responses import Plan, respond
from spotune_serve.gateway.served_model import ServedModel
from spotune_serve.gateway.versions import Versions
from spotune_serve.protocol.predict import ModelInfo, PredictEvent, Prediction, PredictRequest, PredictResponse
from spotune_serve.protocol.sampling import SamplingFields
from spotune_serve.protocol.sse import json_of

_GREEDY = 0.0


def predict_routes(versions: Versions) -> APIRouter:
    """The routes of predictions and of the model's description."""
    router = APIRouter()

    @router.get("/v1/predict", response_model=ModelInfo)
    async def describe() -> ModelInfo:
        return model_info(versions.main_model)

    @router.post("/v1/predict", response_model=PredictResponse)
    async def predict(body: PredictRequest, request: Request) -> Response:
        name = body.model or versions.name

        def plan(model: ServedModel) -> Plan:
            prompts = [model.prediction_prompt(row) for row in body.all_rows]
            encoded = [model.encode_prediction(prompt) for prompt in prompts]
            temperature = _GREEDY if body.temperature is None else body.temperature
            sampling = SamplingFields(model=name, temperature=temperature, seed=body.seed)
            limit = body.max_new_tokens or model.manifest.max_new_tokens
            choices = plan_choices(model, sampling, encoded, limit, None, request.state.request_id)
            return Plan(choices, PredictionWriter(name, prompts))

        return await respond(versions, request, name, plan, stream=bool(body.stream))

    return router


class PredictionWriter:
    """Writes answers as responses of `/v1/predict`.

    Args:
        model: id of the model or adapter.
        prompts: the rendered prompts.
    """

    def __init__(self, model: str, prompts: Sequence[str]) -> None:
        self._model = model
        self._prompts = prompts

    def response(self, answers: Sequence[Answer]) -> PredictResponse:
        """The whole response."""
        predictions = [
            Prediction(prompt=prompt, answer=answer.text, finish_reason=answer.finish_reason)
            for prompt, answer in zip(self._prompts, answers, strict=True)
        ]
        return PredictResponse(model=self._model, predictions=predictions)

    async def chunks(self, parts: AsyncGenerator[AnswerPart, None]) -> AsyncGenerator[bytes, None]:
        """The events of a stream: the prompts, the answers in parts, and for each its finish reason."""
        async with aclosing(parts):
            for index, prompt in enumerate(self._prompts):
                yield json_of(PredictEvent(index=index, text="", prompt=prompt, tokens=0))
            async for part in parts:
                event = PredictEvent(index=part.choice, text=part.text, tokens=part.num_tokens)
                if part.finish_reason is not None:
                    event.finish_reason = part.finish_reason
                yield json_of(event)


def model_info(model: ServedModel) -> ModelInfo:
    """What clients need to know of a model."""
    manifest = model.manifest
    return ModelInfo(
        model=model.name,
        adapters=list(model.adapters),
        task=manifest.task,
        prompt=manifest.prompt,
        fields=model.fields,
        messages=manifest.messages,
        chat=model.chats,
        max_new_tokens=manifest.max_new_tokens,
        max_prompt_tokens=model.max_prompt_tokens,
    )
