// Lets the search run where a browser starts no workers: in pages that were opened as files. The worker's script gets an
// iframe of its own instead. Over HTTP it does nothing.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      this.started = new Promise((resolve) => {
        inner.addEventListener("load", resolve);
        this.frame.addEventListener("load", resolve);
      });
      addEventListener("message", (event) => {
        if (event.source !== this.frame.contentWindow) return;
        const told = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(told);
        this.onmessage?.(told);
      });
      inner.document.open();
      inner.document.write(
        `<script>postMessage = (data) => parent.postMessage(data, "*")</script><script src="${url}"></script>`);
      inner.document.close();
    }

    postMessage(data) {
      this.started.then(() =>
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
