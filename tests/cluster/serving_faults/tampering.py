"""Gateways that lose or repeat a token when a stream continues: a `sitecustomize` on the path of their Python."""

from __future__ import annotations

from typing import Any, Final

_NAME = "tampering"
_FOLDER = "/tampering"
_HOOK = """
import builtins, functools, sys

_import = builtins.__import__

def patched(*args, **kwargs):
    found = _import(*args, **kwargs)
    module = sys.modules.get("spotune_serve.deployment.token_transport.ray_backend")
    backend = getattr(module, "RayBackend", None)
    if backend is not None:
        builtins.__import__ = _import
        tamper(backend)
    return found

builtins.__import__ = patched

def tamper(backend):
    from dataclasses import replace
    generate = backend.generate

    async def wrong(self, request):
        continues = bool(request.generated)
"""
REPEATS_A_TOKEN: Final = (
    _HOOK
    + """
        if continues:
            request = replace(request, generated=request.generated[:-1])
        async for chunk in generate(self, request):
            yield chunk

    backend.generate = wrong
"""
)
DROPS_A_TOKEN: Final = (
    _HOOK
    + """
        async for chunk in generate(self, request):
            if continues and chunk.tokens:
                continues, chunk = False, replace(chunk, tokens=chunk.tokens[1:])
            yield chunk

    backend.generate = wrong
"""
)
POD_TEMPLATE: Final[dict[str, Any]] = {
    "spec": {
        "volumes": [{"name": _NAME, "configMap": {"name": _NAME}}],
        "containers": [
            {
                "name": "ray-worker",
                "env": [{"name": "PYTHONPATH", "value": _FOLDER}],
                "volumeMounts": [{"name": _NAME, "mountPath": _FOLDER}],
            }
        ],
    }
}


def config_map(script: str) -> dict[str, Any]:
    """The ConfigMap with the `sitecustomize`."""
    data = {"sitecustomize.py": script}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": _NAME}, "data": data}
