"""What a run learns from: text packed into folders of tokens, mapped, blended and read in an order that is a function.

`pack` writes a folder (`folder` says what is in it), `source` opens what --data names, `blend` says which sample comes at a cursor,
`loader` reads it and `ahead` does so before it is asked for. A cursor counts samples over all ranks since the start of the run.
"""
