"""How checkpoints/tiny-dsa is made: data, tokenizer, model, training phases, export, gates."""
