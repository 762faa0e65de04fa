"""remat in the trainers that people use: `remat.integrations.transformers`, `remat.integrations.lightning`.

Each of these modules imports its library; `import remat` imports none of them.
"""
