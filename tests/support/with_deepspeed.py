"""Imports DeepSpeed in one of several processes. It must be imported first: accelerate looks for DeepSpeed once."""

import os

import deepspeed_client

os.environ["LOCAL_RANK"] = os.environ["RANK"]
deepspeed_client.make_importable()
