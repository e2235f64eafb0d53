"""The contents of the store: columns and rows, the blocks that have them, the files that have the blocks. Begin with
`block_index.py`.
"""
