// Pages that are opened as files may not start Web Workers, and Material's search is one. This runs a worker's script in
// a hidden frame, with the two sides' messages passed between this object and the frame's window.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inner = frame.contentWindow
      this.inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      // The search's script loads others (stemmers) with importScripts, which a frame does not have.
      this.inner.importScripts = (...urls) => Promise.all(urls.map(each => this.load(each)))
      this.ready = this.load(url)
    }

    load(url) {
      return new Promise(loaded => {
        const script = this.inner.document.createElement("script")
        script.src = url
        script.onload = loaded
        this.inner.document.body.append(script)
      })
    }

    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
