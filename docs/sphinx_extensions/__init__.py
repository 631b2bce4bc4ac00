"""What Sphinx is given besides its own: MathML, figures, links to the lab and to files, the reference, search."""
