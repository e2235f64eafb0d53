"""The transport of weights from the trainer's ranks to the engines.

publication/        files in shared memory, which every engine of a machine loads; `trainer/publishing.py` writes them
chain/              publications from node to node, while they are written
weight_senders.py   from GPU to GPU, while engines wait; `engine_calls.py` is the engines' side
vllm/               the other end of both, inside vLLM
"""
