// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What two legs cost at least: the system calls and nothing else.
//
//   cc -O2 -o floor tests/bench/floor.c
//   ./floor PORT PREFILL_PORT,PREFILL_PORT DECODE_PORT,DECODE_PORT
//
// It passes each request to a prefill engine as it is, and, when that has answered,
// to a decode engine, whose answer goes to the client. It looks at nothing but the
// ends of messages, takes every byte for well-formed and copies nothing: not a proxy,
// but what a proxy's costs can be compared with. One thread, epoll, kept connections.

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

enum { BUFFER = 4 << 20, DESCRIPTORS = 1 << 20, EVENTS = 512, IDLE = 8192 };

enum kind { LISTENER, CLIENT, PREFILL, DECODE };

struct engine {
  int port, count, idle[IDLE];
};

// One for each descriptor. `peer` is the other side of the leg that is running.
struct end {
  enum kind kind;
  int peer;
  struct engine *engine;
  char *request;  // A client's, until decode has it.
  size_t size;
};

static struct engine prefill[8], decode[8];
static int prefills, decodes, turn, poller;
static struct end *ends;
static char buffer[BUFFER];

static void watch(int fd, enum kind kind) {
  struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
  int one = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  ends[fd].kind = kind;
  ends[fd].peer = -1;
  epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
}

static struct sockaddr_in loopback(int port) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

static void write_all(int fd, const char *data, size_t size) {
  while (size) {
    ssize_t sent = write(fd, data, size);
    if (sent <= 0) return;
    data += sent;
    size -= sent;
  }
}

// Sends a client's request to an engine, on an idle connection or a new one.
static void ask(int client, struct engine *engine, enum kind kind) {
  int fd;
  if (engine->count) {
    fd = engine->idle[--engine->count];
  } else {
    struct sockaddr_in address = loopback(engine->port);
    fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, (struct sockaddr *)&address, sizeof address)) abort();
    watch(fd, kind);
    ends[fd].engine = engine;
  }
  ends[fd].peer = client;
  ends[client].peer = fd;
  write_all(fd, ends[client].request, ends[client].size);
}

// Bytes that a message has to have, by its head; 0 if the head does not say.
static size_t whole(const char *data, size_t size) {
  const char *end = memmem(data, size, "\r\n\r\n", 4);
  if (!end) return (size_t)-1;
  for (const char *at = data; at < end; at++)
    if ((*at | 32) == 'c' && at[-1] == '\n' && !strncasecmp(at, "content-length:", 15))
      return end + 4 - data + strtoul(at + 15, NULL, 10);
  return 0;
}

static int chunks_end(const char *data, size_t size) {
  return size >= 5 && !memcmp(data + size - 5, "0\r\n\r\n", 5);
}

static void release(int fd) {
  struct end *end = &ends[fd];
  end->peer = -1;
  end->size = 0;
  if (end->engine->count < IDLE) end->engine->idle[end->engine->count++] = fd;
}

static void from_client(int fd) {
  struct end *client = &ends[fd];
  ssize_t got = read(fd, buffer, BUFFER);
  if (got <= 0) {
    if (client->peer >= 0) ends[client->peer].peer = -1;
    free(client->request);
    memset(client, 0, sizeof *client);
    close(fd);
    return;
  }
  client->request = realloc(client->request, client->size + got + 1);
  memcpy(client->request + client->size, buffer, got);
  client->size += got;
  client->request[client->size] = 0;
  size_t wanted = whole(client->request, client->size);
  if (wanted > client->size) return;
  ask(fd, &prefill[turn % prefills], PREFILL);
}

static void from_prefill(int fd) {
  struct end *leg = &ends[fd];
  ssize_t got = read(fd, buffer, BUFFER - 1);
  if (got <= 0) return;
  buffer[got] = 0;
  size_t wanted = whole(buffer, got);
  if (wanted ? wanted > (size_t)got : !chunks_end(buffer, got)) return;
  int client = leg->peer;
  release(fd);
  if (client >= 0) ask(client, &decode[turn++ % decodes], DECODE);
}

static void from_decode(int fd) {
  struct end *leg = &ends[fd];
  ssize_t got = read(fd, buffer, BUFFER - 1);
  if (got <= 0) return;
  buffer[got] = 0;
  if (leg->peer >= 0) write_all(leg->peer, buffer, got);
  size_t wanted = leg->size ? 0 : whole(buffer, got);
  leg->size += got;
  if (wanted ? wanted > (size_t)got : !chunks_end(buffer, got)) return;
  if (leg->peer >= 0) {
    ends[leg->peer].size = 0;
    ends[leg->peer].peer = -1;
  }
  release(fd);
}

static int engines(struct engine *found, char *ports) {
  int count = 0;
  for (char *port = strtok(ports, ","); port; port = strtok(NULL, ","))
    found[count++].port = atoi(port);
  return count;
}

int main(int argc, char **argv) {
  if (argc != 4) return 2;
  struct rlimit limit;
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
  ends = calloc(DESCRIPTORS, sizeof *ends);
  prefills = engines(prefill, argv[2]);
  decodes = engines(decode, argv[3]);
  poller = epoll_create1(0);
  int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in address = loopback(atoi(argv[1]));
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  if (bind(listener, (struct sockaddr *)&address, sizeof address)) return 1;
  listen(listener, 4096);
  watch(listener, LISTENER);
  struct epoll_event ready[EVENTS];
  for (;;) {
    int count = epoll_wait(poller, ready, EVENTS, -1);
    for (int n = 0; n < count; n++) {
      int fd = ready[n].data.fd;
      switch (ends[fd].kind) {
        case LISTENER: watch(accept(fd, NULL, NULL), CLIENT); break;
        case CLIENT: from_client(fd); break;
        case PREFILL: from_prefill(fd); break;
        case DECODE: from_decode(fd); break;
      }
    }
  }
}
