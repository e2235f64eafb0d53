"""The transport of weights from the trainer's ranks to the engines.

publication/   files in shared memory, which every engine of a machine can load; `trainer/publishing.py` writes them
chain/         publications from node to node, while they are written
streaming/     from GPU to GPU, behind the interface in `transport.py`
vllm/          the other end of both, inside vLLM
"""
