"""Lossy gradient compression for dp over slow links: fewer bytes, less precision than float32."""
