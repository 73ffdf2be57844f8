"""Ray Serve is imported here first: it uses a deprecated argument of Pydantic, which is not ours to change."""

from __future__ import annotations

import warnings

from pydantic import PydanticDeprecatedSince20

with warnings.catch_warnings():
    warnings.simplefilter("ignore", PydanticDeprecatedSince20)
    import ray.serve  # noqa: F401
