"""Files of raw rows in object stores, on the Hugging Face Hub and on web servers: found by name, copied while read.

The clients are the stores' own, with the environment variables that MosaicML streaming reads for shards. Nothing here
imports streaming or torch, so the preflight may use it beside the Ray head.
"""
