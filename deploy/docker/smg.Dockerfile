# The gateway of deploy/kubernetes/overlays/smg: SMG from PyPI, which has all of itself in one wheel.
#
#   docker build -f deploy/docker/smg.Dockerfile -t smg:1.13.0 deploy/docker
FROM python:3.11-slim-bookworm
RUN pip install --no-cache-dir smg==1.13.0 && useradd --key UID_MAX=65000 --uid 64647 --no-create-home --shell /usr/sbin/nologin smg
USER 64647:64647
EXPOSE 30000 29000
HEALTHCHECK --interval=10s --timeout=5s CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:30000/liveness', timeout=4)"]
ENTRYPOINT ["smg"]
