"""`/v1/predict`: rows in, answers out, prompted and decoded as `spotune predict` does."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from spotune_serve.gateway.answers import Answerer, AnswerPart, api_error_of
from spotune_serve.gateway.openai_api import plan_choices
from spotune_serve.gateway.served_model import ServedModel
from spotune_serve.gateway.settings import GatewaySettings
from spotune_serve.protocol.predict import ModelInfo, PredictEvent, Prediction, PredictRequest, PredictResponse
from spotune_serve.protocol.sampling import SamplingFields
from spotune_serve.protocol.sse import EventStream, started, until_disconnected

_GREEDY = 0.0


def predict_routes(model: ServedModel, answerer: Answerer, settings: GatewaySettings) -> APIRouter:
    """The routes of predictions and of the model's description."""
    router = APIRouter()

    @router.get("/v1/predict", response_model=ModelInfo)
    async def describe() -> ModelInfo:
        return model_info(model)

    @router.post("/v1/predict", response_model=PredictResponse)
    async def predict(body: PredictRequest, request: Request) -> Response:
        prompts = [model.prediction_prompt(row) for row in body.all_rows]
        encoded = [model.encode_prediction(prompt) for prompt in prompts]
        sampling = SamplingFields(
            model=body.model or model.name,
            temperature=_GREEDY if body.temperature is None else body.temperature,
            seed=body.seed,
        )
        limit = body.max_new_tokens or model.manifest.max_new_tokens
        choices = plan_choices(model, sampling, encoded, limit, None, request.state.request_id)
        if body.stream:
            parts = await started(request.receive, answerer.parts(choices))
            return EventStream(_events(parts, prompts), lambda error: api_error_of(error, settings))
        answers = await until_disconnected(request.receive, answerer.collect(choices))
        predictions = [
            Prediction(prompt=prompt, answer=answer.text, finish_reason=answer.finish_reason)
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
        return JSONResponse(PredictResponse(model=sampling.model, predictions=predictions).model_dump())

    return router


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


async def _events(
    parts: AsyncGenerator[AnswerPart, None], prompts: Sequence[str]
) -> AsyncGenerator[PredictEvent, None]:
    """The events of a stream: the prompts, the answers in parts, and for each its finish reason."""
    async with aclosing(parts):
        for index, prompt in enumerate(prompts):
            yield PredictEvent(index=index, text="", prompt=prompt, tokens=0)
        async for part in parts:
            event = PredictEvent(index=part.choice, text=part.text, tokens=part.num_tokens)
            if part.finish_reason is not None:
                event.finish_reason = part.finish_reason
            yield event
