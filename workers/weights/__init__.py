"""The transport of weights from the trainer's ranks to the engines. Begin with `transport.py`: one interface over every
way.

publication/   files in shared memory, which every engine of a machine can load
streaming/     from GPU to GPU
vllm/          the other end of both, inside vLLM
"""
