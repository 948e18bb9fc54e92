# A training image. PyPI's torch 2.13.0 brings its own CUDA libraries; the host needs only the NVIDIA driver.
FROM python:3.12-slim-bookworm

RUN apt-get update && apt-get install -y --no-install-recommends git g++ ninja-build make && rm -rf /var/lib/apt/lists/*
WORKDIR /farfield
COPY requirements.txt ./
RUN pip install --no-cache-dir -r requirements.txt
COPY . .
ENV PYTHONUNBUFFERED=1
ENTRYPOINT ["python", "deepy.py"]
CMD ["--help"]
