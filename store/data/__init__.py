"""What the store holds: columns and rows, the blocks that have them, the files that have the blocks. Begin with
`blocks.py`.
"""
